// Sixteen numbers at a time, with AVX-512, AVX2 or NEON. Except for AMX, only this file depends on the processor.
//
// All forms compute the same bits, except for those of a NaN: every operation is rounded once, as IEEE 754 says, and
// sums over the lanes are added up in the same order. Products of bfloat16 are another exception: the instructions of
// AVX-512 and of AMX add up and round in their own ways.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>

#define INLINE inline __attribute__((always_inline))

// ------------------------------------------------------------------------- four numbers, and the state of a processor

#ifdef __aarch64__

using Four = float32x4_t;

INLINE Four load_four(const float* from) { return vld1q_f32(from); }
INLINE Four all_four(float x) { return vdupq_n_f32(x); }
INLINE void store(float* to, Four x) { vst1q_f32(to, x); }
INLINE Four multiply_add(Four a, Four b, Four c) { return vfmaq_f32(c, a, b); }
INLINE Four maximum(Four a, Four b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE void transpose(Four* x) {
  float numbers[16];
  for (int i = 0; i < 4; i++) store(numbers + 4 * i, x[i]);
  const float32x4x4_t columns = vld4q_f32(numbers);
  for (int i = 0; i < 4; i++) x[i] = columns.val[i];
}

// Rounding to nearest, and denormal numbers are kept.
constexpr uint64_t ROUNDING = 0;
INLINE uint64_t control_word() {
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
INLINE void set_control_word(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
INLINE void pause_briefly() { asm volatile("yield"); }

#else

using Four = __m128;

INLINE Four load_four(const float* from) { return _mm_loadu_ps(from); }
INLINE Four all_four(float x) { return _mm_set1_ps(x); }
INLINE void store(float* to, Four x) { _mm_storeu_ps(to, x); }
INLINE Four multiply_add(Four a, Four b, Four c) { return _mm_fmadd_ps(a, b, c); }
// If one of the two is NaN, the second is returned.
INLINE Four maximum(Four a, Four b) { return _mm_max_ps(a, b); }
INLINE __v8sf maximum(__v8sf a, __v8sf b) { return _mm256_max_ps(a, b); }
INLINE void transpose(Four* x) { _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]); }

// Rounding to nearest, and denormal numbers are kept.
constexpr unsigned ROUNDING = 0x1f80;
INLINE unsigned control_word() { return _mm_getcsr(); }
INLINE void set_control_word(unsigned control) { _mm_setcsr(control); }
INLINE void pause_briefly() { _mm_pause(); }

#endif

// ------------------------------------------------------------------------------------------------------------- sixteen

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

// As many as a register holds: a part of the sixteen.
#ifdef __aarch64__

using Part = float32x4_t;
using Words = uint32x4_t;  // unsigned, so that sums and products wrap around

INLINE void load(const float* from, Part& x) { x = vld1q_f32(from); }
INLINE void fill(Part& x, float number) { x = vdupq_n_f32(number); }
INLINE Part minimum(Part x, Part y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE Part to_floats(Words x) { return vcvtq_f32_s32((int32x4_t)x); }
INLINE Words to_ints(Part x) { return (Words)vcvtnq_s32_f32(x); }
// Bytes are widened to 16 bits first, those at even places and those at odd ones.
INLINE Words dot_bytes(Words sum, Words a, Words b) {
  const int16x8_t even = (int16x8_t)(a & 0xff00ff), odd = (int16x8_t)((uint16x8_t)a >> 8);
  const int32x4_t half = vpadalq_s16((int32x4_t)sum, even * ((int16x8_t)((uint16x8_t)b << 8) >> 8));
  return (Words)vpadalq_s16(half, odd * ((int16x8_t)b >> 8));
}

#else

using Part = __v8sf;
using Words = __v8su;

INLINE void load(const float* from, Part& x) { x = _mm256_loadu_ps(from); }
INLINE void store(float* to, Part x) { _mm256_storeu_ps(to, x); }
INLINE void fill(Part& x, float number) { x = _mm256_set1_ps(number); }
INLINE Part multiply_add(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
// If one of the two is NaN, the second is returned.
INLINE Part minimum(Part x, Part y) { return _mm256_min_ps(x, y); }
INLINE Part to_floats(Words x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE Words to_ints(Part x) { return (Words)_mm256_cvtps_epi32(x); }
// `maddubs` would saturate: bytes are widened to 16 bits first, those at even places and those at odd ones.
INLINE Words dot_bytes(Words sum, Words a, Words b) {
  const __m256i even = (__m256i)(a & 0xff00ff), odd = _mm256_srli_epi16((__m256i)a, 8);
  sum += (Words)_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8));
  return sum + (Words)_mm256_madd_epi16(odd, _mm256_srai_epi16((__m256i)b, 8));
}

#endif

// A bfloat16 is the upper half of a float.
INLINE Part dot_bfloat16(Part sum, Words a, Words b) {
  sum = multiply_add((Part)(a << 16), (Part)(b << 16), sum);
  return multiply_add((Part)(a & 0xffff0000), (Part)(b & 0xffff0000), sum);
}
INLINE Part as_floats(Words x) { return (Part)x; }
INLINE Words as_ints(Part x) { return (Words)x; }

// The sixteen, as two parts or as two pairs of parts.
template <class Half>
struct Pair {
  Half a, b;
};
template <class Half>
Pair(Half, Half) -> Pair<Half>;

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
template <class Half>
INLINE Pair<Half> operator/(Pair<Half> x, Pair<Half> y) {
  return {x.a / y.a, x.b / y.b};
}
template <class Half>
INLINE Pair<Half> operator<<(Pair<Half> x, int bits) {
  return {x.a << bits, x.b << bits};
}
template <class Half>
INLINE void load(const float* from, Pair<Half>& x) {
  load(from, x.a);
  load(from + sizeof(Half) / sizeof(float), x.b);
}
template <class Half>
INLINE void store(float* to, Pair<Half> x) {
  store(to, x.a);
  store(to + sizeof(Half) / sizeof(float), x.b);
}
template <class Half>
INLINE void fill(Pair<Half>& x, float number) {
  fill(x.a, number);
  fill(x.b, number);
}
template <class Half>
INLINE Pair<Half> multiply_add(Pair<Half> x, Pair<Half> y, Pair<Half> z) {
  return {multiply_add(x.a, y.a, z.a), multiply_add(x.b, y.b, z.b)};
}
template <class Half>
INLINE Pair<Half> minimum(Pair<Half> x, Pair<Half> y) {
  return {minimum(x.a, y.a), minimum(x.b, y.b)};
}
template <class Half>
INLINE Pair<Half> maximum(Pair<Half> x, Pair<Half> y) {
  return {maximum(x.a, y.a), maximum(x.b, y.b)};
}
template <class Half>
INLINE auto to_floats(Pair<Half> x) {
  return Pair{to_floats(x.a), to_floats(x.b)};
}
template <class Half>
INLINE auto to_ints(Pair<Half> x) {
  return Pair{to_ints(x.a), to_ints(x.b)};
}
template <class Half>
INLINE auto as_floats(Pair<Half> x) {
  return Pair{as_floats(x.a), as_floats(x.b)};
}
template <class Half>
INLINE auto as_ints(Pair<Half> x) {
  return Pair{as_ints(x.a), as_ints(x.b)};
}
template <class Half>
INLINE Pair<Half> dot_bytes(Pair<Half> sum, Pair<Half> a, Pair<Half> b) {
  return {dot_bytes(sum.a, a.a, b.a), dot_bytes(sum.b, a.b, b.b)};
}
template <class Half, class Word>
INLINE Pair<Half> dot_bfloat16(Pair<Half> sum, Pair<Word> a, Pair<Word> b) {
  return {dot_bfloat16(sum.a, a.a, b.a), dot_bfloat16(sum.b, a.b, b.b)};
}

#ifdef __aarch64__
using Floats = Pair<Pair<Part> >;
using Ints = Pair<Pair<Words> >;
#else
using Floats = Pair<Part>;
using Ints = Pair<Words>;
#endif

INLINE Floats load(const float* from) {
  Floats x;
  load(from, x);
  return x;
}
INLINE Floats all(float x) {
  Floats numbers;
  fill(numbers, x);
  return numbers;
}
INLINE Ints load_words(const void* from) { return as_ints(load((const float*)from)); }
INLINE Ints all_words(int32_t x) {
  float bits;
  __builtin_memcpy(&bits, &x, 4);
  return as_ints(all(bits));
}
INLINE void store_bytes(uint8_t* to, Ints x) {
  int32_t words[16];
  store((float*)words, as_floats(x));
  for (int lane = 0; lane < 16; lane++) to[lane] = words[lane] < 0 ? 0 : words[lane] > 255 ? 255 : words[lane];
}
INLINE void store_bfloat16(uint16_t* to, Floats x) {
  uint32_t bits[16];
  store((float*)bits, x);
  for (int lane = 0; lane < 16; lane++) {
    const bool is_nan = (bits[lane] & 0x7fffffff) > 0x7f800000;
    // To the nearest, ties to even; NaN stays NaN.
    to[lane] = is_nan ? bits[lane] >> 16 | 64 : (bits[lane] + 0x7fff + (bits[lane] >> 16 & 1)) >> 16;
  }
}

// A tile of a product: as many accumulators as fit into 16 registers of eight numbers, or 32 of four.
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;

#endif

// ------------------------------------------------------- one number from sixteen: of eight pairs, of four, two and one

INLINE float maximum(float x, float y) { return x > y ? x : y; }

template <class Operation>
INLINE float reduce(Four x, Operation pairwise) {
  return pairwise(pairwise(x[0], x[2]), pairwise(x[1], x[3]));
}
#ifndef __aarch64__
template <class Operation>
INLINE float reduce(__v8sf x, Operation pairwise) {
  return reduce(pairwise(Four(_mm256_castps256_ps128(x)), Four(_mm256_extractf128_ps(x, 1))), pairwise);
}
#endif
#ifdef __AVX512F__
template <class Operation>
INLINE float reduce(Floats x, Operation pairwise) {
  return reduce(pairwise(__v8sf(_mm512_castps512_ps256(x)), __v8sf(_mm512_extractf32x8_ps(x, 1))), pairwise);
}
#else
template <class Half, class Operation>
INLINE float reduce(Pair<Half> x, Operation pairwise) {
  return reduce(pairwise(x.a, x.b), pairwise);
}
#endif
INLINE float sum_of(Floats x) {
  return reduce(x, [](auto a, auto b) { return a + b; });
}
INLINE float maximum_of(Floats x) {
  return reduce(x, [](auto a, auto b) { return maximum(a, b); });
}
