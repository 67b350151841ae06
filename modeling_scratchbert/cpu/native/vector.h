// Sixteen numbers at a time, with AVX-512 or with AVX2: the only file that depends on the processor.
//
// Both forms compute the same bits: every operation is rounded once, as IEEE 754 says, and sums over the lanes are
// added up in the same order. The exception is bfloat16, which the processor's own instruction rounds in its own way.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define INLINE inline __attribute__((always_inline))

#ifdef __AVX512F__

using Floats = __m512;
using Ints = __v16su;  // unsigned, so that sums and products wrap around

INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// If one of the two is NaN, the second is returned.
INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
INLINE Ints to_ints(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }  // to the nearest
INLINE Floats as_floats(Ints x) { return (Floats)x; }
INLINE Ints as_ints(Floats x) { return (Ints)x; }
INLINE Ints load_words(const void* from) { return (Ints)_mm512_loadu_si512(from); }
INLINE Ints all_words(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
INLINE __m256 first_half(Floats x) { return _mm512_castps512_ps256(x); }
INLINE __m256 second_half(Floats x) { return _mm512_extractf32x8_ps(x, 1); }
// Four sums of products of a byte without and one with a sign. With the intrinsic, g++ 12 copies each sum twice.
INLINE Ints dot_bytes(Ints sum, Ints a, Ints b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
INLINE Floats dot_bfloat16(Floats sum, Ints a, Ints b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE void store_bytes(uint8_t* to, Ints x) {
  const __m512i positive = _mm512_max_epi32((__m512i)x, _mm512_setzero_si512());
  _mm_storeu_si128((__m128i*)to, _mm512_cvtusepi32_epi8(positive));
}
INLINE void store_bfloat16(uint16_t* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
}

// A tile of a product: as many accumulators as fit into 32 registers.
constexpr int TILE_ROWS = 12, TILE_VECTORS = 2;

#else

template <class Half>
struct Pair {
  Half a, b;
};
using Floats = Pair<__v8sf>;
using Ints = Pair<__v8su>;

template <class Half>
INLINE Pair<Half> operator+(Pair<Half> x, Pair<Half> y) {
  return {x.a + y.a, x.b + y.b};
}
template <class Half>
INLINE Pair<Half> operator-(Pair<Half> x, Pair<Half> y) {
  return {x.a - y.a, x.b - y.b};
}
template <class Half>
INLINE Pair<Half> operator*(Pair<Half> x, Pair<Half> y) {
  return {x.a * y.a, x.b * y.b};
}
INLINE Floats operator/(Floats x, Floats y) { return {x.a / y.a, x.b / y.b}; }
INLINE Ints operator<<(Ints x, int bits) { return {x.a << bits, x.b << bits}; }
INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats multiply_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// If one of the two is NaN, the second is returned.
INLINE Floats minimum(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE Floats maximum(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps((__m256i)x.a), _mm256_cvtepi32_ps((__m256i)x.b)}; }
INLINE Ints to_ints(Floats x) { return {(__v8su)_mm256_cvtps_epi32(x.a), (__v8su)_mm256_cvtps_epi32(x.b)}; }
INLINE Floats as_floats(Ints x) { return {(__m256)x.a, (__m256)x.b}; }
INLINE Ints as_ints(Floats x) { return {(__v8su)x.a, (__v8su)x.b}; }
INLINE Ints load_words(const void* from) { return as_ints(load((const float*)from)); }
INLINE Ints all_words(int32_t x) { return {(__v8su)_mm256_set1_epi32(x), (__v8su)_mm256_set1_epi32(x)}; }
INLINE __m256 first_half(Floats x) { return x.a; }
INLINE __m256 second_half(Floats x) { return x.b; }
// `maddubs` would saturate: bytes are widened to 16 bits first, those at even places and those at odd ones.
INLINE __v8su dot_half(__v8su sum, __m256i a, __m256i b) {
  __m256i even = _mm256_and_si256(a, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(a, 8);
  sum += (__v8su)_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  return sum + (__v8su)_mm256_madd_epi16(odd, _mm256_srai_epi16(b, 8));
}
INLINE Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return {dot_half(sum.a, (__m256i)a.a, (__m256i)b.a), dot_half(sum.b, (__m256i)a.b, (__m256i)b.b)};
}
// A bfloat16 is the upper half of a float.
INLINE __m256 dot_half(__m256 sum, __m256i a, __m256i b) {
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  sum = _mm256_fmadd_ps((__m256)_mm256_slli_epi32(a, 16), (__m256)_mm256_slli_epi32(b, 16), sum);
  return _mm256_fmadd_ps((__m256)_mm256_and_si256(a, upper), (__m256)_mm256_and_si256(b, upper), sum);
}
INLINE Floats dot_bfloat16(Floats sum, Ints a, Ints b) {
  return {dot_half(sum.a, (__m256i)a.a, (__m256i)b.a), dot_half(sum.b, (__m256i)a.b, (__m256i)b.b)};
}
INLINE void store_bytes(uint8_t* to, Ints x) {
  for (int lane = 0; lane < 16; lane++) {
    const int32_t word = lane < 8 ? x.a[lane] : x.b[lane - 8];
    to[lane] = word < 0 ? 0 : word > 255 ? 255 : word;
  }
}
INLINE void store_bfloat16(uint16_t* to, Floats x) {
  alignas(32) float numbers[16];
  store(numbers, x);
  for (int lane = 0; lane < 16; lane++) {
    uint32_t bits;
    __builtin_memcpy(&bits, numbers + lane, 4);
    // To the nearest, ties to even; NaN stays NaN.
    to[lane] = numbers[lane] != numbers[lane] ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

// A tile of a product: as many accumulators as fit into 16 registers.
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;

#endif

// One number from sixteen, in a fixed order: eight pairs, four, two, one.
template <class Operation>
INLINE float reduce(Floats x, Operation pairwise) {
  __m256 eight = pairwise(first_half(x), second_half(x));
  __m128 four = _mm256_castps256_ps128(pairwise(eight, _mm256_permute2f128_ps(eight, eight, 1)));
  __m256 two = pairwise(_mm256_castps128_ps256(four), _mm256_castps128_ps256(_mm_movehl_ps(four, four)));
  __m128 last = _mm256_castps256_ps128(two);
  return _mm_cvtss_f32(_mm256_castps256_ps128(pairwise(two, _mm256_castps128_ps256(_mm_shuffle_ps(last, last, 1)))));
}
INLINE float sum_of(Floats x) {
  return reduce(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
INLINE float maximum_of(Floats x) {
  return reduce(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
