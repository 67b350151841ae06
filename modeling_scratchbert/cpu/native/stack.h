// BERT's stack of blocks (Vaswani et al. 2017, section 3; Devlin et al. 2018): those of an encoder, or of a decoder
// with caches and cross-attention.
//
// A row of numbers, which belongs to one token, has the same bits in any batch and with any number of threads, because
// nothing depends on the other rows: every output of a product is one sum over the inputs in their order, in float32 a
// chain of fused multiply-adds, whatever tile it is computed in; norms, activations and quantisation read one row;
// attention reads one sequence.
//
// Weights come in panels of 32 outputs, [outputs / 32][words][32], where a word of 32 bits holds the weights of one
// float32, two bfloat16 or four int8 inputs, so that a product reads memory in its order.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "vector.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE_LAMBDA __attribute__((always_inline))

enum Type : int64_t { FLOAT32, BFLOAT16, INT8 };
enum Activation : int64_t { IDENTITY, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, RELU };

constexpr int PANEL = 32;
// Up to ROWS_FOR_ALL rows, all threads compute the same ones; of more rows, each thread computes up to ROWS_OF_ONE at a
// time, in whole units.
#ifdef HAS_AMX
constexpr int ROWS_FOR_ALL = 128, ROWS_OF_ONE = 96, UNIT = 32;
#else
constexpr int ROWS_FOR_ALL = 96, ROWS_OF_ONE = 96, UNIT = 1;
#endif
// The rows of sequences that are computed in one pass, and those of a layer outside of the stack that are computed at a
// time: their intermediate results stay in the cache.
constexpr int ROWS_OF_PASS = 2048, ROWS_OF_LAYER = 256;
constexpr int INVALID = 1, NO_MEMORY = 2;

constexpr int64_t rounded_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }
constexpr int64_t whole_panels(int64_t number) { return rounded_up(number, PANEL); }
constexpr int numbers_in_word(Type type) { return type == INT8 ? 4 : type == BFLOAT16 ? 2 : 1; }

// ---------------------------------------------------------------------------------------------- what the caller passes

// W and b of x Wᵀ + b; both widths are multiples of 32, with zeros at the end. For int8: the scale of each output, the
// sum of its weights, and what inputs are multiplied by. `largest`, if it is not null, receives the largest absolute
// value of each input.
struct Linear {
  int64_t inputs, outputs;
  const uint32_t* panels;
  const float *bias, *scales, *input_factors;
  const int32_t* sums;
  float* largest;
};

struct Norm {
  const float *weight, *bias;
};

struct Block {
  Linear query_key_value, attention_output, cross_query, cross_output, intermediate, output;
  Norm attention_norm, cross_norm, feed_forward_norm;
};

// `number` blocks. Rows and attention heads end in zeros: a row of x has `hidden` numbers, and those of queries, keys
// and values have `heads` times `hidden / heads`.
struct Stack {
  int64_t size;  // of this struct, in bytes
  Type type;
  Activation activation;
  int64_t hidden, inner, heads, norm_first, number;
  double epsilon;
  const Block* blocks;

  int64_t width() const { return whole_panels(hidden); }
  int64_t head_width() const { return rounded_up(hidden / heads, 16); }
  int64_t attention_width() const { return whole_panels(heads * head_width()); }
};

// What the queries of each sequence attend to: `number` keys and values, `is_key[sequence * number + i]` of them, in
// memory of `size` numbers, `(sequences, heads, number, head_width)`; or, if `keys` is null, those of the sequence
// itself. The query in a row attends to the first `counts[row]` of them. Without `is_key` and `counts`, to all.
struct Keys {
  const float *keys, *values;
  int64_t size, number;
  const uint8_t* is_key;
  const int32_t* counts;
};

// Sequences: the rows `starts[i]` to `starts[i + 1]` of `x`, `(rows, width)`. What is computed is what follows the
// queries, keys and values of block `first`, up to those of block `last`; from the start if `first` is 0, and to the
// end if `last` is the number of blocks. `queries` and `projected`, `(rows, 3 * attention_width)`, are those of the
// first and of the last block. `x` is changed in place. `source` is for cross-attention.
struct Batch {
  float* x;
  const float* queries;
  float* projected;
  const int32_t* starts;
  int64_t rows, sequences, first, last, threads;
  Keys own, source;
};

// A layer outside of the stack, from `(rows, columns)`, with zeros up to a multiple of 32, to `(rows, width)`: x Wᵀ +
// b; or, if there are no panels, a layer norm; or else an activation.
struct Layer {
  Type type;
  Activation activation;
  int64_t columns, width, threads, rows;
  const float* x;
  float* y;
  double epsilon;
  Linear linear;
  Norm norm;
};

// ------------------------------------------------------------------------------------------------------------ products

// Call a function with the constants 0 to n - 1. Unrolled in this way, accumulators stay in registers.
template <int n, int i = 0, class Function>
INLINE void each(const Function& function) {
  if constexpr (i < n) {
    function(std::integral_constant<int, i>());
    each<n, i + 1>(function);
  }
}

// Sixteen sums, to which products of words are added. Those of int8 are whole numbers.
template <Type type>
INLINE Floats add_products(Floats sums, Ints a, Ints b) {
  if (type == INT8) return as_floats(dot_bytes(as_ints(sums), a, b));
  return type == BFLOAT16 ? dot_bfloat16(sums, a, b) : multiply_add(as_floats(a), as_floats(b), sums);
}

// Memory that a product reads into the cache for a later one: with each word of a row, `step` bytes.
struct Ahead {
  const void* from;
  int64_t step;

  INLINE void read(int64_t words = 1) {
    for (int64_t i = 0; i < std::max<int64_t>(128, words * step); i += 64)
      __builtin_prefetch((const char*)from + i, 0, 2);  // into the second cache
    from = (const char*)from + words * step;
  }
};

// A tile of a product: `rows` rows of inputs, `stride` words apart, times a panel.
template <Type type, int rows>
__attribute__((noinline)) void multiply_tile(const uint32_t* inputs, int64_t stride, const uint32_t* panel,
                                             int64_t words, float* outputs, int64_t output_stride, Ahead ahead) {
  for (int column = 0; column < PANEL; column += 16 * TILE_VECTORS) {
    Floats sums[rows][TILE_VECTORS] = {};
    const uint32_t* weights = panel + column;
    // A pointer for three rows: one for each would not fit into registers.
    const uint32_t* threes[(rows + 2) / 3];
    each<(rows + 2) / 3>([&](auto i) INLINE_LAMBDA { threes[i] = inputs + 3 * i * stride; });
    for (int64_t word = 0; word < words; word++, weights += PANEL) {
      ahead.read();
      Ints columns[TILE_VECTORS];
      each<TILE_VECTORS>([&](auto i) INLINE_LAMBDA { columns[i] = load_words(weights + 16 * i); });
      each<rows>([&](auto row) INLINE_LAMBDA {
        Ints input = all_words(threes[row / 3][row % 3 * stride]);
        each<TILE_VECTORS>([&](auto i)
                               INLINE_LAMBDA { sums[row][i] = add_products<type>(sums[row][i], input, columns[i]); });
      });
      each<(rows + 2) / 3>([&](auto i) INLINE_LAMBDA { threes[i]++; });
    }
    each<rows>([&](auto row) INLINE_LAMBDA {
      each<TILE_VECTORS>([&](auto i)
                             INLINE_LAMBDA { store(outputs + row * output_stride + column + 16 * i, sums[row][i]); });
    });
  }
}

#ifdef HAS_AMX
// Rows of inputs that AMX multiplies at a time. It reads as many, whatever they hold.
constexpr int AMX_ROWS = 32;

// The shapes of the eight tiles of AMX: 16 rows of 64 bytes. For the thread that calls this, until it ends.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  _tile_loadconfig(&shapes);
}

// The tile of 16 or, with `is_double`, 32 rows: registers 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
#define ADD(sum, input, weights)         \
  if constexpr (type == INT8) {          \
    _tile_dpbusd(sum, input, weights);   \
  } else {                               \
    _tile_dpbf16ps(sum, input, weights); \
  }
template <Type type, bool is_double>
void multiply_amx(const uint32_t* inputs, int64_t stride, const uint32_t* panel, int64_t words, float* outputs,
                  int64_t output_stride, Ahead ahead) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t word = 0; word < words; word += 16) {
    ahead.read(16);
    _tile_loadd(6, panel + word * PANEL, PANEL * 4);
    _tile_loadd(7, panel + word * PANEL + 16, PANEL * 4);
    _tile_loadd(4, inputs + word, stride * 4);
    ADD(0, 4, 6)
    ADD(1, 4, 7)
    if (!is_double) continue;
    _tile_loadd(5, inputs + 16 * stride + word, stride * 4);
    ADD(2, 5, 6)
    ADD(3, 5, 7)
  }
  _tile_stored(0, outputs, output_stride * 4);
  _tile_stored(1, outputs + 16, output_stride * 4);
  if (!is_double) return;
  _tile_stored(2, outputs + 16 * output_stride, output_stride * 4);
  _tile_stored(3, outputs + 16 * output_stride + 16, output_stride * 4);
}
#undef ADD
#else
constexpr int AMX_ROWS = 0;
inline void configure_tiles() {}
#endif

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, Ahead);
template <Type type, int... i>
constexpr Tile tile_of(int rows, std::integer_sequence<int, i...>) {
  constexpr Tile tiles[] = {multiply_tile<type, i + 1>...};
  return tiles[rows - 1];
}
template <Type type>
INLINE Tile tile_of(int rows, bool is_amx = false) {
#ifdef HAS_AMX
  if constexpr (type != FLOAT32)
    if (is_amx) return rows > 16 ? multiply_amx<type, true> : multiply_amx<type, false>;
#endif
  return tile_of<type>(rows, std::make_integer_sequence<int, TILE_ROWS>());
}

// Rows in the format of a product; for int8, x ≈ scale · (q - zero), with q in 0 … 255.
struct Inputs {
  uint32_t* words;
  float* scales;
  int32_t* zeros;
};

// Threads share the work of a phase in pieces. Whichever thread is free claims the next one, so that no thread waits
// for another that the operating system has stopped, unless that one holds a piece. Each phase has counters of its own.
class Team {
  int threads;
  std::atomic<int>* counters;

 public:
  Team(int threads, std::atomic<int>* counters) : threads(threads), counters(counters) {}

  template <class Work>
  void share(int count, Work work, int pieces = 0) {
    pieces = std::min(count, pieces ? pieces : threads == 1 ? 1 : 4 * threads);
    auto compute = [&](int piece) { work(int64_t(count) * piece / pieces, int64_t(count) * (piece + 1) / pieces); };
    if (threads == 1) {
      for (int piece = 0; piece < pieces; piece++) compute(piece);
      return;
    }
    std::atomic<int>&next = counters[0], &done = counters[16];  // in different lines of the cache
    counters += 32;
    for (int piece; (piece = next.fetch_add(1)) < pieces; done.fetch_add(1)) compute(piece);
    for (int spins = 0; done.load() < pieces;) ++spins < 4000 ? pause_briefly() : (void)sched_yield();
  }
};

// Memory of one call; pieces start at lines of the cache.
class Arena {
  std::vector<std::unique_ptr<void, decltype(&free)>> pieces;

 public:
  template <class T>
  T* take(int64_t number) {
    void* memory = aligned_alloc(64, (number * sizeof(T) + 63) / 64 * 64 + 64);
    if (!memory) throw std::bad_alloc();
    pieces.emplace_back(memory, &free);
    return (T*)memory;
  }
  Inputs take_inputs(Type type, int64_t rows, int64_t width) {
    return {take<uint32_t>((rows + AMX_ROWS) * width / numbers_in_word(type)), take<float>(rows), take<int32_t>(rows)};
  }
};

// libgomp's GOMP_parallel, which calls a function in several threads: those that torch uses. Others beside them would
// compete with them, because they stay awake between calls.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
static Parallel parallel = nullptr;
static pid_t process = 0;  // libgomp does not work in a process that is forked from this one

// Call `work(thread, team)` in several threads, with the number of each; or in one, if there is no libgomp. The work
// has at most so many phases.
template <class Work>
void run_threads(int threads, int phases, Work work) {
  struct Call {
    Work& work;
    const int threads;
    std::vector<std::atomic<int>> counters;
  } call = {work, threads, std::vector<std::atomic<int>>(32 * (phases + 1))};
  auto enter = [](void* data) {
    auto& call = *(Call*)data;
    const auto control = control_word();
    set_control_word(ROUNDING);
    configure_tiles();
    call.work(call.counters[0]++, Team(call.threads, &call.counters[32]));
    set_control_word(control);
  };
  if (threads > 1 && parallel && process == getpid()) return parallel(enter, &call, threads, 0);
  enter(&call);
}

// x Wᵀ + b of `rows` rows; `use(row, column, sixteen numbers)` takes the results.
template <Type type, class Use>
void multiply(Team& team, const Inputs& inputs, int rows, const Linear& linear, Use use) {
  const int64_t words = linear.inputs / numbers_in_word(type);
  // AMX has no float32, and its tiles are 16 words wide. With int8, all sums are exact.
  const bool has_amx = AMX_ROWS && type != FLOAT32 && words % 16 == 0;
  const int most = has_amx ? AMX_ROWS : TILE_ROWS, tiles = (rows + most - 1) / most;
  team.share(linear.outputs / PANEL, [&](int first, int last) {
    alignas(64) float results[std::max(TILE_ROWS, AMX_ROWS) * PANEL];
    for (int panel = first; panel < last; panel++)
      for (int tile = 0; tile < tiles; tile++) {
        const int start = has_amx ? tile * AMX_ROWS : int64_t(rows) * tile / tiles;
        const int number = has_amx ? std::min(AMX_ROWS, rows - start) : int64_t(rows) * (tile + 1) / tiles - start;
        const uint32_t *from = inputs.words + start * words, *weights = linear.panels + panel * words * PANEL;
        // With one tile, 16 KB ahead, which doubles the speed; or else each tile reads its part of the next panel.
        const uint32_t* next = tiles == 1 ? weights + 4096 : weights + words * PANEL * (tiles + tile) / tiles;
        const Ahead ahead = {next, std::max(1, 128 / tiles)};
        tile_of<type>(number, has_amx)(from, words, weights, words, results, PANEL, ahead);
        for (int column = 0; column < PANEL; column += 16) {
          const int output = panel * PANEL + column;
          const Floats bias = load(linear.bias + output);
          for (int row = 0; row < number; row++) {
            Floats y = load(results + row * PANEL + column);
            if constexpr (type == INT8) {
              const Ints zeros = all_words(inputs.zeros[start + row]) * load_words(linear.sums + output);
              const Floats scale = all(inputs.scales[start + row]) * load(linear.scales + output);
              y = multiply_add(to_floats(as_ints(y) - zeros), scale, bias);
            } else {
              y = y + bias;
            }
            use(start + row, output, y);
          }
        }
      }
  });
}

// -------------------------------------------------------------------------------------------------- one row at a time

// Write one row in the format of the inputs of a product. In float32, it is in that format: see `inputs_from`.
template <Type type>
void convert(const float* x, const Linear& linear, const Inputs& to, int64_t row) {
  const int64_t width = linear.inputs;
  uint32_t* words = to.words + row * (width / numbers_in_word(type));
  if constexpr (type == BFLOAT16)
    for (int64_t i = 0; i < width; i += 16) store_bfloat16((uint16_t*)words + i, load(x + i));
  if constexpr (type == INT8) {
    const float* factors = linear.input_factors;
    auto scaled = [&](int64_t i) INLINE_LAMBDA { return factors ? load(x + i) * load(factors + i) : load(x + i); };
    Floats negative = all(0), positive = all(0), not_finite = all(0);
    for (int64_t i = 0; i < width; i += 16) {
      const Floats v = scaled(i);
      negative = maximum(negative, all(0) - v);
      positive = maximum(positive, v);
      not_finite = multiply_add(v, all(0), not_finite);  // NaN for NaN and infinity, which would become numbers
    }
    const float below = maximum_of(negative), range = maximum_of(positive) + below;
    // Of smaller ranges, 1 / scale would be infinite.
    const float scale = range > 1e-30f ? range / 255 : 1, zero = std::nearbyint(below / scale);
    to.scales[row] = scale + sum_of(not_finite);
    to.zeros[row] = std::isfinite(zero) ? int32_t(zero) : 0;
    for (int64_t i = 0; i < width; i += 16)
      store_bytes((uint8_t*)words + i, to_ints(multiply_add(scaled(i), all(1 / scale), all(zero))));
  }
}

// The inputs of a product: in float32 the rows of x themselves, else those that `convert` has written.
template <Type type>
Inputs inputs_from(const float* x, const Inputs& converted) {
  return type == FLOAT32 ? Inputs{(uint32_t*)x, nullptr, nullptr} : converted;
}

// Raise `largest` to the absolute values of a row; to NaN if there is NaN or infinity in any row.
inline void note_largest(const float* x, int64_t width, float* largest) {
  for (int64_t i = 0; i < width; i += 16) {
    const Floats input = load(x + i), size = maximum(input, all(0) - input);
    store(largest + i, multiply_add(input, all(0), maximum(size, load(largest + i))));
  }
}

// (x - mean) / sqrt(variance + ε) · weight + bias, of `hidden` of `width` numbers; zeros follow.
inline void normalize(const float* x, int64_t hidden, int64_t width, const Norm& norm, float epsilon, float* to) {
  alignas(64) static const float IS_NUMBER[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  Floats sum = all(0), squares = all(0);
  for (int64_t i = 0; i < hidden; i += 16) sum = sum + load(x + i);
  const Floats mean = all(sum_of(sum) / hidden);
  for (int64_t i = 0; i < hidden; i += 16) {
    Floats difference = load(x + i) - mean;
    if (i + 16 > hidden) difference = difference * load(IS_NUMBER + 16 - (hidden - i));
    squares = multiply_add(difference, difference, squares);
  }
  const Floats factor = all(1 / std::sqrt(sum_of(squares) / hidden + epsilon));
  for (int64_t i = 0; i < width; i += 16)
    store(to + i, multiply_add((load(x + i) - mean) * factor, load(norm.weight + i), load(norm.bias + i)));
}

// exp(x) for x up to 87, as 2ⁿ exp(r) with |r| ≤ ln(2) / 2 (Cephes, expf).
INLINE Floats exponential(Floats x) {
  x = minimum(all(87), maximum(all(-87), x));
  const Ints n = to_ints(x * all(1.44269504f));  // to the nearest
  const Floats r = multiply_add(to_floats(n), all(2.12194440e-4f), multiply_add(to_floats(n), all(-0.693359375f), x));
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, all(c));
  p = multiply_add(p * r, r, r + all(1));
  return p * as_floats((n + all_words(127)) << 23);
}

// x Φ(x), with erf(t) as a quotient of polynomials, t between -4 and 4 (Eigen, generic_fast_erf_float).
INLINE Floats gelu(Floats x) {
  const Floats t = maximum(all(-4), minimum(all(4), x * all(0.70710678118f))), s = t * t;
  Floats p = all(-2.72614225801306e-10f), q = all(-1.45660718464996e-05f);
  for (float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                  -2.95459980854025e-03f, -1.60960333262415e-02f})
    p = multiply_add(p, s, all(c));
  for (float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f})
    q = multiply_add(q, s, all(c));
  const Floats half = x * all(0.5f);
  return multiply_add(t * p / q, half, half);
}

// 1 / (1 + exp(-x))
INLINE Floats sigmoid(Floats x) { return all(1) / (all(1) + exponential(all(0) - x)); }

// tanh(x), as a quotient of polynomials, x between -7.9 and 7.9 (Eigen, ptanh_float).
INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats t = maximum(all(-7.90531110763549805f), minimum(all(7.90531110763549805f), x)), s = t * t;
  Floats p = all(-2.76076847742355e-16f), q = all(1.19825839466702e-06f);
  for (float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f,
                  6.37261928875436e-04f, 4.89352455891786e-03f})
    p = multiply_add(p, s, all(c));
  for (float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) q = multiply_add(q, s, all(c));
  return t * p / q;
}

INLINE Floats activate(Activation activation, Floats x) {
  switch (activation) {
    case GELU:
      return gelu(x);
    // x / (1 + exp(-2 sqrt(2 / π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016)
    case GELU_TANH:
      return x * sigmoid(multiply_add(x * x * x, all(0.044715f), x) * all(1.5957691216f));
    case QUICK_GELU:
      return x * sigmoid(x * all(1.702f));
    case SILU:
      return x * sigmoid(x);
    case SIGMOID:
      return sigmoid(x);
    case TANH:
      return hyperbolic_tangent(x);
    case RELU:
      return maximum(all(0), x);
    default:
      return x;
  }
}

// ----------------------------------------------------------------------------------------------------------- attention

// softmax(Q Kᵀ · scaling) V of one sequence and one head.
class Attention {
  const int64_t query_stride, to_stride, head_width, value_width, score_stride;
  const float scaling;
  float *const keys, *const values, *const scores, *const context;
  int32_t* const places;  // of the keys that are attended to, `length` of them
  int length;

 public:
  Attention(const Stack& stack, Arena& arena, int64_t longest)
      : query_stride(3 * stack.attention_width()),
        to_stride(stack.attention_width()),
        head_width(stack.head_width()),
        value_width(whole_panels(head_width)),
        score_stride(whole_panels(longest) + 16),
        scaling(1 / std::sqrt(double(stack.hidden / stack.heads))),
        keys(arena.take<float>(score_stride * head_width)),
        values(arena.take<float>(longest * value_width)),
        scores(arena.take<float>(TILE_ROWS * score_stride)),
        context(arena.take<float>(TILE_ROWS * value_width)),
        places(arena.take<int32_t>(longest)) {}

  // Attend from the `rows` queries of a sequence to `number` keys and values, `stride` numbers apart.
  void operator()(const float* query, int rows, const float* key, const float* value, int64_t stride, int number,
                  const uint8_t* is_key, const int32_t* counts, float* to) {
    length = 0;
    for (int i = 0; i < number; i++)
      if (!is_key || is_key[i]) places[length++] = i;
    if (rows == 1) return attend_from_one(query, key, value, stride, counts ? std::min(*counts, length) : length, to);
    // Kᵀ in panels of 32 keys, 4 × 4 numbers at a time; keys after the last one are zeros.
    for (int j = 0; j < whole_panels(length); j += 4)
      for (int d = 0; d < head_width; d += 4) {
        Four four[4];
        load_transposed(key + d, stride, j, length, four);
        float* panel = keys + j / PANEL * head_width * PANEL + j % PANEL;
        for (int i = 0; i < 4; i++) store(panel + (d + i) * PANEL, four[i]);
      }
    for (int d = 0; d < value_width; d += 16)
      for (int j = 0; j < length; j++)
        store(values + (d / PANEL * length + j) * PANEL + d % PANEL,
              d < head_width ? load(value + places[j] * stride + d) : all(0));
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
      const int first = int64_t(rows) * tile / tiles, number = int64_t(rows) * (tile + 1) / tiles - first;
      attend(query + first * query_stride, number, counts ? counts + first : nullptr, to + first * to_stride);
    }
  }

 private:
  // Four numbers of each of four keys from the one at place `j` of `count`.
  INLINE void load_transposed(const float* key, int64_t stride, int j, int count, Four* four) const {
    for (int i = 0; i < 4; i++) four[i] = j + i < count ? load_four(key + places[j + i] * stride) : Four{};
    transpose(four);
  }

  void attend(const float* query, int rows, const int32_t* counts, float* to) {
    int lengths[TILE_ROWS], longest = 0;
    for (int row = 0; row < rows; row++) {
      lengths[row] = counts ? std::min(counts[row], length) : length;
      longest = std::max(longest, lengths[row]);
    }
    const Tile multiply = tile_of<FLOAT32>(rows);
    for (int64_t panel = 0; panel * PANEL < longest; panel++)
      multiply((const uint32_t*)query, query_stride, (const uint32_t*)keys + panel * head_width * PANEL, head_width,
               scores + panel * PANEL, score_stride, {keys, 0});
    float totals[TILE_ROWS];
    for (int row = 0; row < rows; row++) totals[row] = exponentials(scores + row * score_stride, lengths[row], longest);
    for (int64_t d = 0; d < value_width; d += PANEL)
      multiply((const uint32_t*)scores, score_stride, (const uint32_t*)values + d * length, longest, context + d,
               value_width, {values, 0});
    for (int row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_width; d += 16)
        store(to + row * to_stride + d,
              lengths[row] ? load(context + row * value_width + d) / all(totals[row]) : all(0));
  }

  // The same for a single query, as in decoding, which reads keys and values where they are.
  void attend_from_one(const float* query, const float* key, const float* value, int64_t stride, int count, float* to) {
    for (int j = 0; j < count; j += 4) {
      Four sum = {};  // of four keys
      for (int64_t d = 0; d < head_width; d += 4) {
        Four four[4];
        load_transposed(key + d, stride, j, count, four);
        for (int i = 0; i < 4; i++) sum = multiply_add(all_four(query[d + i]), four[i], sum);
      }
      store(scores + j, sum);
    }
    const float total = exponentials(scores, count, count);
    for (int64_t d = 0; d < head_width; d += 16) {
      Floats sum = all(0);
      for (int j = 0; j < count; j++) sum = multiply_add(all(scores[j]), load(value + places[j] * stride + d), sum);
      store(to + d, count ? sum / all(total) : sum);
    }
  }

  // Replace the first `count` scores s of a row by exp((s - max s) · scaling), and those after them by zeros, and
  // return the sum.
  float exponentials(float* row, int count, int longest) {
    const int rounded = (count + 15) / 16 * 16;
    for (int i = count; i < rounded; i++) row[i] = -INFINITY;
    Floats largest = all(-INFINITY), sum = all(0);
    for (int i = 0; i < rounded; i += 16) largest = maximum(largest, load(row + i));
    const Floats shift = all(maximum_of(largest));
    for (int i = 0; i < rounded; i += 16) store(row + i, exponential((load(row + i) - shift) * all(scaling)));
    for (int i = count; i < std::max(rounded, longest); i++) row[i] = 0;
    for (int i = 0; i < rounded; i += 16) sum = sum + load(row + i);
    return sum_of(sum);
  }
};

// ----------------------------------------------------------------------------------------------------------- the stack

// One pass over the sequences from `begin` to before `end`, through the blocks.
template <Type type>
class Pass {
  // What a thread needs to compute a block of rows; one for all if they share the rows.
  struct Scratch {
    float *inner, *normalized;
    Inputs inputs;
  };
  // `number` rows from `from`, and the threads that compute them.
  struct Rows {
    int64_t from;
    int number;
    Team& team;
    Scratch& scratch;

    template <class Function>
    void each(Function function) {
      team.share(number, [&](int begin, int end) {
        for (int64_t row = begin; row < end; row++) function(row);
      });
    }
  };

  const Stack& stack;
  const Batch& batch;
  const int64_t begin, width, attention_width, inner;
  const int sequences, rows;
  const bool is_shared;  // whether all threads compute the same rows
  const int32_t* starts;
  const float* queries;
  float *x, *projected, *context;
  Arena arena;
  std::vector<Scratch> scratches;
  std::vector<Attention> attentions;  // one for each thread

 public:
  Pass(const Stack& stack, const Batch& batch, int64_t begin, int64_t end)
      : stack(stack),
        batch(batch),
        begin(begin),
        width(stack.width()),
        attention_width(stack.attention_width()),
        inner(whole_panels(stack.inner)),
        sequences(end - begin),
        rows(batch.starts[end] - batch.starts[begin]),
        is_shared(rows <= ROWS_FOR_ALL),
        starts(batch.starts + begin) {
    const int64_t row = starts[0], own = is_shared ? rows : ROWS_OF_ONE;
    x = batch.x + row * width;
    projected =
        batch.projected ? batch.projected + row * 3 * attention_width : arena.take<float>(3 * rows * attention_width);
    queries = batch.queries ? batch.queries + row * 3 * attention_width : projected;
    context = arena.take<float>(rows * attention_width);
    if (attention_width > stack.heads * stack.head_width()) memset(context, 0, rows * attention_width * sizeof(float));
    int64_t longest = std::max(batch.own.number, batch.source.number);
    for (int i = 0; i < sequences; i++) longest = std::max<int64_t>(longest, starts[i + 1] - starts[i]);
    for (int i = 0; i < batch.threads; i++) {
      attentions.emplace_back(stack, arena, longest);
      if (i && is_shared) continue;
      scratches.push_back({arena.take<float>(own * inner), arena.take<float>(own * width),
                           arena.take_inputs(type, own, std::max({width, attention_width, inner}))});
    }
  }

  void run() {
    run_threads(batch.threads, 20 * (batch.last - batch.first + 1),
                [this](int thread, Team team) { compute(thread, team); });
  }

 private:
  void compute(int thread, Team& together) {
    Team alone(1, nullptr);
    Attention& attention = attentions[thread];
    Scratch& scratch = scratches[is_shared ? 0 : thread];
    const int threads = batch.threads, units = (rows + UNIT - 1) / UNIT;
    const int blocks = std::max(threads, (rows + ROWS_OF_ONE - 1) / ROWS_OF_ONE);
    auto share_rows = [&](auto function) {
      if (is_shared) return function(Rows{0, rows, together, scratch});
      together.share(
          units,
          [&](int from, int to) {
            function(Rows{from * UNIT, std::min(to * UNIT, rows) - from * UNIT, alone, scratch});
          },
          rounded_up(blocks, threads));
    };
    for (int64_t i = batch.first; i <= batch.last; i++) {
      if (i) attend(together, attention, i == batch.first ? queries : projected, batch.own);
      if (i && batch.source.keys) {
        share_rows([&](Rows rows) { compute_cross_queries(stack.blocks[i - 1], rows); });
        attend(together, attention, projected, batch.source);
      }
      share_rows([&](Rows rows) { compute_rows(i, rows); });
    }
  }

  // Write the attention heads of all rows to `context`.
  void attend(Team& team, Attention& attention, const float* queries, const Keys& keys) {
    const int64_t heads = stack.heads, head_width = stack.head_width(), query_stride = 3 * attention_width;
    auto attend_from = [&](int64_t sequence, int64_t head) {
      const int64_t row = starts[sequence] - starts[0], length = starts[sequence + 1] - starts[sequence];
      if (length == 0) return;
      const float* query = queries + row * query_stride + head * head_width;
      const float *key = query + attention_width, *value = key + attention_width;
      if (keys.keys) {
        const int64_t place = ((begin + sequence) * heads + head) * keys.number * head_width;
        key = keys.keys + place;
        value = keys.values + place;
      }
      attention(query, length, key, value, keys.keys ? head_width : query_stride, keys.keys ? keys.number : length,
                keys.is_key ? keys.is_key + (begin + sequence) * keys.number : nullptr,
                keys.counts ? keys.counts + starts[sequence] : nullptr,
                context + row * attention_width + head * head_width);
    };
    const int count = sequences * heads;
    team.share(
        count,
        [&](int first, int last) {
          for (int i = first; i < last; i++) attend_from(i / heads, i % heads);
        },
        count);
  }

  // The queries of cross-attention, after attention.
  void compute_cross_queries(const Block& block, Rows& rows) {
    add_product(rows, context + rows.from * attention_width, block.attention_output);
    const Norm* norm = stack.norm_first ? &block.cross_norm : &block.attention_norm;
    multiply_normalized(rows, norm, &block.cross_query, to_projected(rows));
  }

  // What follows attention in block i - 1, up to the queries, keys and values of block i.
  void compute_rows(int64_t i, Rows& rows) {
    const Block* block = i < stack.number ? stack.blocks + i : nullptr;
    const Norm* norm = stack.norm_first && block ? &block->attention_norm : nullptr;
    if (i) {
      const Block& before = stack.blocks[i - 1];
      const bool has_source = batch.source.keys;
      float* activated = rows.scratch.inner;
      add_product(rows, context + rows.from * attention_width,
                  has_source ? before.cross_output : before.attention_output);
      multiply_normalized(rows,
                          stack.norm_first ? &before.feed_forward_norm
                          : has_source     ? &before.cross_norm
                                           : &before.attention_norm,
                          &before.intermediate, [&](int64_t row, int column, Floats y) INLINE_LAMBDA {
                            store(activated + row * inner + column, activate(stack.activation, y));
                          });
      add_product(rows, activated, before.output);
      if (!stack.norm_first) norm = &before.feed_forward_norm;
    }
    if (norm || block) multiply_normalized(rows, norm, block ? &block->query_key_value : nullptr, to_projected(rows));
  }

  // x ← x + y Wᵀ + b
  void add_product(Rows& rows, const float* y, const Linear& linear) {
    float* sums = x + rows.from * width;
    if (type != FLOAT32)
      rows.each([&](int64_t row) { convert<type>(y + row * linear.inputs, linear, rows.scratch.inputs, row); });
    multiply<type>(rows.team, inputs_from<type>(y, rows.scratch.inputs), rows.number, linear,
                   [&](int64_t row, int column, Floats product) INLINE_LAMBDA {
                     float* to = sums + row * width + column;
                     store(to, load(to) + product);
                   });
  }

  // norm(x) Wᵀ + b. Post-norm, which ends a sublayer, norm(x) replaces x; pre-norm, which begins one, it does not.
  template <class Use>
  void multiply_normalized(Rows& rows, const Norm* norm, const Linear* linear, Use use) {
    float *from = x + rows.from * width, *normalized = stack.norm_first ? rows.scratch.normalized : from;
    rows.each([&](int64_t row) {
      float* to = normalized + row * width;
      if (norm) normalize(from + row * width, stack.hidden, width, *norm, stack.epsilon, to);
      if (linear && linear->largest) note_largest(to, width, linear->largest);
      if (linear) convert<type>(to, *linear, rows.scratch.inputs, row);
    });
    if (linear)
      multiply<type>(rows.team, inputs_from<type>(normalized, rows.scratch.inputs), rows.number, *linear, use);
  }

  auto to_projected(const Rows& rows) {
    float* to = projected + rows.from * 3 * attention_width;
    return [to, stride = 3 * attention_width](int64_t row, int column, Floats y)
               INLINE_LAMBDA { store(to + row * stride + column, y); };
  }
};

// ------------------------------------------------------------------------------------------------- what is exported

inline bool is_known(Type type, Activation activation) {
  return type >= FLOAT32 && type <= INT8 && activation >= IDENTITY && activation <= RELU;
}

inline bool fits(const Linear& linear, int64_t inputs, int64_t outputs, Type type) {
  const bool is_complete = linear.panels && linear.bias && (type != INT8 || (linear.scales && linear.sums));
  return is_complete && inputs % PANEL == 0 && linear.inputs == inputs && linear.outputs == outputs;
}

inline bool is_valid(const Stack& stack, bool has_source) {
  if (stack.size != sizeof(Stack) || !is_known(stack.type, stack.activation) || stack.number < 0) return false;
  if (stack.heads < 1 || stack.hidden < stack.heads || stack.inner < 1 || (stack.number && !stack.blocks)) return false;
  const int64_t width = stack.width(), attended = stack.attention_width(), inner = whole_panels(stack.inner);
  return std::all_of(stack.blocks, stack.blocks + stack.number, [&](const Block& block) {
    auto fits = [&](const Linear& linear, int64_t inputs, int64_t outputs) {
      return ::fits(linear, inputs, outputs, stack.type);
    };
    const bool has_cross = fits(block.cross_query, width, attended) && fits(block.cross_output, attended, width);
    return fits(block.query_key_value, width, 3 * attended) && fits(block.attention_output, attended, width) &&
           (has_cross || !has_source) && fits(block.intermediate, width, inner) && fits(block.output, inner, width);
  });
}

inline bool is_valid(const Keys& keys, const Stack& stack, const Batch& batch) {
  const int64_t size = batch.sequences * stack.heads * keys.number * stack.head_width();
  if (keys.number < 0 || (keys.keys && (!keys.values || size > keys.size))) return false;
  for (int64_t i = 0; keys.counts && i < batch.rows; i++)
    if (keys.counts[i] < 0) return false;
  for (int64_t i = 0; !keys.keys && keys.is_key && i < batch.sequences; i++)
    if (batch.starts[i + 1] - batch.starts[i] != keys.number) return false;
  return true;
}

inline bool is_valid(const Batch& batch, const Stack& stack) {
  if (batch.first < 0 || batch.last < batch.first || batch.last > stack.number || batch.threads < 1) return false;
  if ((batch.first && !batch.queries) || (batch.rows && !batch.x) || !batch.starts || batch.sequences < 0) return false;
  if (batch.starts[0] != 0 || batch.starts[batch.sequences] != batch.rows) return false;
  for (int64_t i = 0; i < batch.sequences; i++)
    if (batch.starts[i + 1] < batch.starts[i]) return false;
  return true;
}

template <Type type>
void run(const Stack& stack, const Batch& batch) {
  for (int64_t begin = 0, end; begin < batch.sequences; begin = end) {
    for (end = begin + 1; end < batch.sequences && batch.starts[end + 1] - batch.starts[begin] <= ROWS_OF_PASS;) end++;
    if (batch.starts[end] > batch.starts[begin]) Pass<type>(stack, batch, begin, end).run();
  }
}

// A few rows at a time, which stay in the cache.
template <Type type>
void compute(const Layer& layer) {
  const int64_t most = std::min<int64_t>(layer.rows, ROWS_OF_LAYER), width = layer.width, columns = layer.columns;
  Arena arena;
  const Inputs inputs = arena.take_inputs(type, most, columns);
  float* normalized = arena.take<float>(most * columns);
  auto keep = [&](int64_t row, int64_t column, Floats y) INLINE_LAMBDA {  // the result, without the zeros at its end
    if (column + 16 <= width) return store(layer.y + row * width + column, y);
    alignas(64) float numbers[16];
    store(numbers, y);
    if (column < width) memcpy(layer.y + row * width + column, numbers, (width - column) * sizeof(float));
  };
  for (int64_t first = 0; first < layer.rows; first += most) {
    const int number = std::min(most, layer.rows - first);
    const float* x = layer.x + first * columns;
    run_threads(layer.threads, 2, [&](int, Team team) {
      team.share(number, [&](int begin, int end) {
        for (int64_t row = begin; row < end; row++) {
          const float* from = x + row * columns;
          if (layer.linear.panels) {
            convert<type>(from, layer.linear, inputs, row);
            continue;
          }
          float* to = normalized + row * columns;
          if (layer.norm.weight) normalize(from, width, columns, layer.norm, layer.epsilon, to);
          for (int64_t i = 0; i < columns; i += 16)
            keep(first + row, i, layer.norm.weight ? load(to + i) : activate(layer.activation, load(from + i)));
        }
      });
      if (layer.linear.panels)
        multiply<type>(team, inputs_from<type>(x, inputs), number, layer.linear,
                       [&](int64_t row, int column, Floats y) INLINE_LAMBDA { keep(first + row, column, y); });
    });
  }
}

// Call a function with the type as a constant. Return 0, or NO_MEMORY.
template <class Function>
int call(Type type, Function function) {
  try {
    if (type == FLOAT32) function(std::integral_constant<Type, FLOAT32>());
    if (type == BFLOAT16) function(std::integral_constant<Type, BFLOAT16>());
    if (type == INT8) function(std::integral_constant<Type, INT8>());
    return 0;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

// Use the threads of libgomp; `function` is its GOMP_parallel.
EXPORT void scratchbert_use_threads(Parallel function) {
  parallel = function;
  process = getpid();
}

EXPORT int scratchbert_run(const Stack* stack, const Batch* batch) {
  if (!is_valid(*stack, batch->source.keys) || !is_valid(*batch, *stack)) return INVALID;
  if (batch->last > 0 && !is_valid(batch->own, *stack, *batch)) return INVALID;
  if (batch->source.keys && !is_valid(batch->source, *stack, *batch)) return INVALID;
  return call(stack->type, [&](auto type) { run<type>(*stack, *batch); });
}

EXPORT int scratchbert_layer(const Layer* layer) {
  const int64_t columns = layer->columns, outputs = whole_panels(layer->width);
  if (!is_known(layer->type, layer->activation) || layer->width < 1 || layer->threads < 1) return INVALID;
  if (layer->rows < 0 || (layer->rows && (!layer->x || !layer->y))) return INVALID;
  const bool fits_linear = layer->linear.panels && fits(layer->linear, columns, outputs, layer->type);
  const bool fits_other = !layer->linear.panels && columns == outputs && (!layer->norm.weight || layer->norm.bias);
  if (!fits_linear && !fits_other) return INVALID;
  return call(layer->type, [&](auto type) { compute<type>(*layer); });
}
