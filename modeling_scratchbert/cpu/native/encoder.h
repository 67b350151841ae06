// BERT's stack of encoder blocks (Vaswani et al. 2017, section 3; Devlin et al. 2018), over sequences without padding.
//
// A row of numbers, which belongs to one token, has the same bits in any batch and with any number of threads, because
// nothing depends on the other rows: every output of a product is one chain of fused multiply-adds over the inputs in
// their order, whatever tile it is computed in; norms, activations and quantisation read one row; attention reads one
// sequence.
//
// Weights come in panels of 32 outputs, [outputs / 32][words][32], where a word of 32 bits holds the weights of one
// float32, two bfloat16 or four int8 inputs, so that a product reads memory in its order.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "vector.h"

enum Type : int64_t { FLOAT32, BFLOAT16, INT8 };
enum Activation : int64_t { GELU, GELU_TANH, RELU };

constexpr int PANEL = 32;
// One block of rows for all threads together, up to this number of rows; or blocks of so many rows for each thread.
// Blocks are whole units.
#ifdef __AMX_TILE__
constexpr int ROWS_FOR_ALL = 128, ROWS_OF_ONE = 64, UNIT = 32;
#else
constexpr int ROWS_FOR_ALL = 96, ROWS_OF_ONE = 48, UNIT = 1;
#endif
// Sequences that are computed in one pass, whose intermediate results stay in the cache.
constexpr int ROWS_OF_PASS = 2048;
constexpr int INVALID = 1, NO_MEMORY = 2;

constexpr int numbers_in_word(Type type) { return type == INT8 ? 4 : type == BFLOAT16 ? 2 : 1; }

// ---------------------------------------------------------------------------------------------- what the caller passes

// W and b of x Wᵀ + b. For int8: the scale of each output, the sum of its weights, and what inputs are multiplied by.
struct Linear {
  int64_t inputs, outputs;
  const uint32_t* panels;
  const float *bias, *scales, *input_factors;
  const int32_t* sums;
};

struct Norm {
  const float *weight, *bias;
};

struct Block {
  Linear query_key_value, attention_output, intermediate, output;
  Norm attention_norm, output_norm;
};

struct Encoder {
  int64_t size;  // of this struct, in bytes
  Type type;
  Activation activation;
  int64_t hidden, inner, heads, norm_first, number;
  double epsilon;
  const Block* blocks;
};

// ------------------------------------------------------------------------------------------------------------ products

// Call a function with the constants 0 to n - 1. Unrolled in this way, accumulators stay in registers.
template <class Function, int... i> INLINE void each(Function function, std::integer_sequence<int, i...>) {
  (function(std::integral_constant<int, i>()), ...);
}
template <int n, class Function> INLINE void each(Function function) {
  each(function, std::make_integer_sequence<int, n>());
}

template <Type type> struct Sum {
  Floats value = all(0);
  INLINE void add(Ints a, Ints b) {
    value = type == BFLOAT16 ? dot_bfloat16(value, a, b) : multiply_add(as_floats(a), as_floats(b), value);
  }
  INLINE Floats bits() const { return value; }
};
template <> struct Sum<INT8> {
  Ints value = all_words(0);
  INLINE void add(Ints a, Ints b) { value = dot_bytes(value, a, b); }
  INLINE Floats bits() const { return as_floats(value); }
};

// A tile of a product: `rows` rows of inputs, `stride` words apart, times a panel.
template <Type type, int rows>
__attribute__((noinline)) void multiply_tile(const uint32_t* inputs, int64_t stride, const uint32_t* panel,
                                             int64_t words, float* outputs, int64_t output_stride) {
  for (int column = 0; column < PANEL; column += 16 * TILE_VECTORS) {
    Sum<type> sums[rows][TILE_VECTORS];
    const uint32_t* weights = panel + column;
    // A pointer for three rows: one for each would not fit into registers.
    const uint32_t* threes[(rows + 2) / 3];
    each<(rows + 2) / 3>([&](auto i) __attribute__((always_inline)) { threes[i] = inputs + 3 * i * stride; });
    for (int64_t word = 0; word < words; word++, weights += PANEL) {
      // Memory is read 16 KB ahead. With few rows, this doubles the speed.
      for (int line = 0; line < TILE_VECTORS; line++) _mm_prefetch((const char*)(weights + 4096 + 16 * line), _MM_HINT_T0);
      Ints columns[TILE_VECTORS];
      each<TILE_VECTORS>([&](auto i) __attribute__((always_inline)) { columns[i] = load_words(weights + 16 * i); });
      each<rows>([&](auto row) __attribute__((always_inline)) {
        Ints input = all_words(threes[row / 3][row % 3 * stride]);
        each<TILE_VECTORS>([&](auto i) __attribute__((always_inline)) { sums[row][i].add(input, columns[i]); });
      });
      each<(rows + 2) / 3>([&](auto i) __attribute__((always_inline)) { threes[i]++; });
    }
    each<rows>([&](auto row) __attribute__((always_inline)) {
      each<TILE_VECTORS>([&](auto i) __attribute__((always_inline)) {
        store(outputs + row * output_stride + column + 16 * i, sums[row][i].bits());
      });
    });
  }
}

#ifdef __AMX_TILE__
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

// The product of 16 or, with `is_double`, 32 rows and a panel: tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
#define ADD(sum, input, weights)          \
  if constexpr (type == INT8) {           \
    _tile_dpbusd(sum, input, weights);    \
  } else {                                \
    _tile_dpbf16ps(sum, input, weights);  \
  }
template <Type type, bool is_double>
void multiply_amx(const uint32_t* inputs, const uint32_t* panel, int64_t words, float* outputs) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t word = 0; word < words; word += 16) {
    _tile_loadd(6, panel + word * PANEL, PANEL * 4);
    _tile_loadd(7, panel + word * PANEL + 16, PANEL * 4);
    _tile_loadd(4, inputs + word, words * 4);
    ADD(0, 4, 6)
    ADD(1, 4, 7)
    if (!is_double) continue;
    _tile_loadd(5, inputs + 16 * words + word, words * 4);
    ADD(2, 5, 6)
    ADD(3, 5, 7)
  }
  _tile_stored(0, outputs, PANEL * 4);
  _tile_stored(1, outputs + 16, PANEL * 4);
  if (!is_double) return;
  _tile_stored(2, outputs + 16 * PANEL, PANEL * 4);
  _tile_stored(3, outputs + 16 * PANEL + 16, PANEL * 4);
}
#undef ADD
#else
constexpr int AMX_ROWS = 0;
inline void configure_tiles() {}
#endif

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t);
template <Type type, int... i> constexpr Tile tile_of(int rows, std::integer_sequence<int, i...>) {
  constexpr Tile tiles[] = {multiply_tile<type, i + 1>...};
  return tiles[rows - 1];
}
template <Type type> INLINE Tile tile_of(int rows) {
  return tile_of<type>(rows, std::make_integer_sequence<int, TILE_ROWS>());
}

// Rows in the format of a product; for int8, x ≈ scale · (q - zero), with q in 0 … 255.
struct Inputs {
  uint32_t* words;
  float* scales;
  int32_t* zeros;
};

// Threads share the work of a phase in pieces. Whichever thread is free claims the next one, so that no thread waits for
// another that the operating system has stopped, unless that one holds a piece. Each phase has counters of its own.
class Team {
  int threads;
  std::atomic<int>* counters;

 public:
  Team(int threads, std::atomic<int>* counters) : threads(threads), counters(counters) {}

  template <class Work> void share(int count, Work work, int pieces = 0) {
    pieces = std::min(count, pieces ? pieces : threads == 1 ? 1 : 4 * threads);
    auto compute = [&](int piece) { work(int64_t(count) * piece / pieces, int64_t(count) * (piece + 1) / pieces); };
    if (threads == 1) {
      for (int piece = 0; piece < pieces; piece++) compute(piece);
      return;
    }
    std::atomic<int>&next = counters[0], &done = counters[16];  // in different lines of the cache
    counters += 32;
    for (int piece; (piece = next.fetch_add(1)) < pieces; done.fetch_add(1)) compute(piece);
    for (int spins = 0; done.load() < pieces;) ++spins < 4000 ? _mm_pause() : (void)sched_yield();
  }
};

// x Wᵀ + b of `rows` rows; `use(row, column, sixteen numbers)` takes the results.
template <Type type, class Use> void multiply(Team& team, const Inputs& inputs, int rows, const Linear& linear, Use use) {
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
        if (!has_amx) tile_of<type>(number)(from, words, weights, words, results, PANEL);
#ifdef __AMX_TILE__
        if constexpr (type != FLOAT32)
          if (has_amx) (number > 16 ? multiply_amx<type, true> : multiply_amx<type, false>)(from, weights, words, results);
#endif
        for (int column = 0; column < PANEL; column += 16) {
          const int output = panel * PANEL + column;
          const Floats bias = load(linear.bias + output);
          for (int row = 0; row < number; row++) {
            Floats y = load(results + row * PANEL + column);
            if constexpr (type == INT8) {
              const Ints zeros = multiply(all_words(inputs.zeros[start + row]), load_words(linear.sums + output));
              const Floats scale = all(inputs.scales[start + row]) * load(linear.scales + output);
              y = multiply_add(to_floats(subtract(as_ints(y), zeros)), scale, bias);
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

// Write one row of inputs in the format of a product.
template <Type type> void convert(const float* x, int64_t width, const float* factors, const Inputs& to, int64_t row) {
  uint32_t* words = to.words + row * (width / numbers_in_word(type));
  if constexpr (type == FLOAT32) {
    if ((const float*)words != x) memcpy(words, x, width * sizeof(float));
  } else if constexpr (type == BFLOAT16) {
    for (int64_t i = 0; i < width; i += 16) store_bfloat16((uint16_t*)words + i, load(x + i));
  } else {
    auto scaled = [&](int64_t i) __attribute__((always_inline)) {
      return factors ? load(x + i) * load(factors + i) : load(x + i);
    };
    Floats low = all(0), high = all(0), not_finite = all(0);
    for (int64_t i = 0; i < width; i += 16) {
      const Floats v = scaled(i);
      low = minimum(low, v);
      high = maximum(high, v);
      not_finite = multiply_add(v, all(0), not_finite);  // NaN for NaN and infinity, which would become numbers
    }
    const float smallest = minimum_of(low), largest = maximum_of(high);
    const float scale = largest > smallest ? (largest - smallest) / 255 : 1, zero = std::nearbyint(-smallest / scale);
    to.scales[row] = scale + sum_of(not_finite);
    to.zeros[row] = int32_t(zero);
    for (int64_t i = 0; i < width; i += 16)
      store_bytes((uint8_t*)words + i, to_ints(multiply_add(scaled(i), all(1 / scale), all(zero))));
  }
}

// (x - mean) / sqrt(variance + ε) · weight + bias
inline void normalize(const float* x, int64_t width, const Norm& norm, float epsilon, float* to) {
  Floats sum = all(0), squares = all(0);
  for (int64_t i = 0; i < width; i += 16) sum = sum + load(x + i);
  const Floats mean = all(sum_of(sum) / width);
  for (int64_t i = 0; i < width; i += 16) {
    const Floats difference = load(x + i) - mean;
    squares = multiply_add(difference, difference, squares);
  }
  const Floats factor = all(1 / std::sqrt(sum_of(squares) / width + epsilon));
  for (int64_t i = 0; i < width; i += 16)
    store(to + i, multiply_add((load(x + i) - mean) * factor, load(norm.weight + i), load(norm.bias + i)));
}

// exp(x) for x up to 87, as 2ⁿ exp(r) with |r| ≤ ln(2) / 2 (Cephes, expf).
INLINE Floats exponential(Floats x) {
  x = minimum(all(87), maximum(all(-87), x));
  const Floats n = nearest(x * all(1.44269504f));
  const Floats r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), x));
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, all(c));
  p = multiply_add(p * r, r, r + all(1));
  return p * as_floats(shift_to_exponent(to_ints(n)));
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

// GELU with tanh: x / (1 + exp(-2 sqrt(2 / π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016)
INLINE Floats gelu_tanh(Floats x) {
  const Floats u = multiply_add(x * x * x, all(0.044715f), x);
  return x / (all(1) + exponential(u * all(-1.5957691216f)));
}

// ----------------------------------------------------------------------------------------------------------- attention

// softmax(Q Kᵀ / sqrt(D)) V of one sequence and one head. The rows at `query` hold queries, keys and values side by side,
// `width` numbers each.
class Attention {
  int64_t width, head_width, value_width, key_panels, score_stride;
  float *keys, *values, *scores, *context;

 public:
  static int64_t workspace(int64_t length, int64_t head_width) {
    const int64_t columns = (length + PANEL - 1) / PANEL * PANEL + 16, value_width = (head_width + 31) / PANEL * PANEL;
    return columns * head_width + length * value_width + TILE_ROWS * (columns + value_width) + 64;
  }

  Attention(int64_t width, int64_t head_width, float* workspace, int64_t longest)
      : width(width), head_width(head_width), value_width((head_width + 31) / PANEL * PANEL) {
    const int64_t columns = (longest + PANEL - 1) / PANEL * PANEL + 16;
    keys = workspace;
    values = keys + columns * head_width;
    scores = values + longest * value_width;
    context = scores + TILE_ROWS * columns;
  }

  // The first `length` of `rows` rows hold keys; the rest, padding, attends to them and is attended to by none.
  void operator()(const float* query, int rows, int length, float* to) {
    key_panels = (length + PANEL - 1) / PANEL;
    score_stride = key_panels * PANEL + 16;
    const float* key = query + width;
    const float* value = key + width;
    const int64_t stride = 3 * width;
    // Kᵀ in panels of 32 keys, 4 × 4 numbers at a time; keys after the last one are zeros.
    for (int j = 0; j < key_panels * PANEL; j += 4)
      for (int d = 0; d < head_width; d += 4) {
        __m128 four[4];
        for (int i = 0; i < 4; i++)
          four[i] = j + i < length ? _mm_loadu_ps(key + (j + i) * stride + d) : _mm_setzero_ps();
        _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
        float* panel = keys + j / PANEL * head_width * PANEL + j % PANEL;
        for (int i = 0; i < 4; i++) _mm_storeu_ps(panel + (d + i) * PANEL, four[i]);
      }
    for (int d = 0; d < value_width; d += 16)
      for (int j = 0; j < length; j++)
        store(values + (d / PANEL * length + j) * PANEL + d % PANEL,
              d < head_width ? load(value + j * stride + d) : all(0));
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
      const int first = int64_t(rows) * tile / tiles, number = int64_t(rows) * (tile + 1) / tiles - first;
      attend(query + first * stride, number, length, to + first * width);
    }
  }

 private:
  void attend(const float* query, int rows, int length, float* to) {
    const Tile multiply = tile_of<FLOAT32>(rows);
    for (int64_t panel = 0; panel < key_panels; panel++)
      multiply((const uint32_t*)query, 3 * width, (const uint32_t*)keys + panel * head_width * PANEL, head_width,
               scores + panel * PANEL, score_stride);
    float totals[TILE_ROWS];
    for (int row = 0; row < rows; row++) totals[row] = exponentials(scores + row * score_stride, length);
    for (int64_t d = 0; d < value_width; d += PANEL)
      multiply((const uint32_t*)scores, score_stride, (const uint32_t*)values + d * length, length, context + d,
               value_width);
    for (int row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_width; d += 16)
        store(to + row * width + d, length ? load(context + row * value_width + d) / all(totals[row]) : all(0));
  }

  // Replace a row of scores s by exp((s - max s) / sqrt(D)), and return the sum of them.
  float exponentials(float* row, int length) {
    const int rounded = (length + 15) / 16 * 16;
    for (int i = length; i < rounded; i++) row[i] = -INFINITY;
    Floats largest = all(-INFINITY), sum = all(0);
    for (int i = 0; i < rounded; i += 16) largest = maximum(largest, load(row + i));
    const Floats shift = all(maximum_of(largest)), scale = all(1 / std::sqrt(float(head_width)));
    for (int i = 0; i < rounded; i += 16) store(row + i, exponential((load(row + i) - shift) * scale));
    for (int i = length; i < rounded; i++) row[i] = 0;
    for (int i = 0; i < rounded; i += 16) sum = sum + load(row + i);
    return sum_of(sum);
  }
};

// ----------------------------------------------------------------------------------------------------------- the stack

// Memory of one call; pieces start at lines of the cache.
class Arena {
  std::vector<std::unique_ptr<void, decltype(&free)>> pieces;

 public:
  template <class T> T* take(int64_t number) {
    void* memory = aligned_alloc(64, (number * sizeof(T) + 63) / 64 * 64 + 64);
    if (!memory) throw std::bad_alloc();
    pieces.emplace_back(memory, &free);
    return (T*)memory;
  }
  Inputs take_inputs(Type type, int64_t rows, int64_t width) {
    return {take<uint32_t>((rows + AMX_ROWS) * width / numbers_in_word(type)), take<float>(rows), take<int32_t>(rows)};
  }
};

// One pass over sequences: the rows `starts[i]` to `starts[i + 1]` of `x`.
template <Type type> class Pass {
  const Encoder& encoder;
  float* x;
  const int32_t *starts, *keys;
  const int sequences, rows, threads;
  const int64_t hidden, inner, head_width;
  const bool is_shared;  // whether all threads compute the same rows
  int longest = 0;
  Arena arena;
  float *projected, *context;
  Inputs inputs;
  std::vector<std::atomic<int>> counters;

  // What a thread needs to compute a block of rows; one for all if they share the rows.
  struct Scratch {
    float *inner, *result, *normalized;
    Inputs context_inputs, inner_inputs;
  };
  std::vector<Scratch> scratches;
  std::vector<float*> attention_workspaces;

 public:
  Pass(const Encoder& encoder, float* x, const int32_t* starts, const int32_t* keys, int sequences, int threads)
      : encoder(encoder), x(x), starts(starts), keys(keys), sequences(sequences), rows(starts[sequences]), threads(threads),
        hidden(encoder.hidden), inner(encoder.inner), head_width(hidden / encoder.heads),
        is_shared(rows <= ROWS_FOR_ALL), counters(32 * 10 * (encoder.number + 1)) {
    for (int i = 0; i < sequences; i++) longest = std::max(longest, starts[i + 1] - starts[i]);
    projected = arena.take<float>(3 * rows * hidden);
    context = arena.take<float>(rows * hidden);
    inputs = arena.take_inputs(type, rows, hidden);
    const int64_t own = is_shared ? rows : std::max(ROWS_FOR_ALL, 2 * ROWS_OF_ONE);
    for (int i = 0; i < threads; i++) {
      attention_workspaces.push_back(arena.take<float>(Attention::workspace(longest, head_width)));
      if (i && is_shared) continue;
      scratches.push_back({arena.take<float>(own * inner), arena.take<float>(own * hidden),
                           arena.take<float>(own * hidden), arena.take_inputs(type, own, hidden),
                           arena.take_inputs(type, own, inner)});
      if (type == FLOAT32) scratches.back().inner_inputs.words = (uint32_t*)scratches.back().inner;
    }
  }

  void run() {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
      try {
        others.emplace_back([this, i] { work(i); });
      } catch (const std::system_error&) {
        break;  // the others do the work of a thread that cannot be had
      }
    }
    work(0);
    for (auto& thread : others) thread.join();
  }

 private:
  void work(int thread) {
    configure_tiles();
    Team together(threads, counters.data()), alone(1, nullptr);
    Attention attention(hidden, head_width, attention_workspaces[thread], longest);
    Scratch& scratch = scratches[is_shared ? 0 : thread];
    const int units = (rows + UNIT - 1) / UNIT, blocks = std::max(threads, (rows + ROWS_OF_ONE - 1) / ROWS_OF_ONE);
    for (int64_t i = 0; i <= encoder.number; i++) {
      if (is_shared)
        compute_rows(i, 0, rows, together, scratch);
      else
        together.share(units, [&](int first, int last) {
          compute_rows(i, first * UNIT, std::min(last * UNIT, rows) - first * UNIT, alone, scratch);
        }, (blocks + threads - 1) / threads * threads);
      if (i == encoder.number) break;
      together.share(sequences * encoder.heads, [&](int first, int last) {
        for (int each = first; each < last; each++) {
          const int sequence = each / encoder.heads, head = each % encoder.heads;
          const int64_t start = starts[sequence], length = starts[sequence + 1] - start;
          attention(projected + start * 3 * hidden + head * head_width, length, keys ? keys[sequence] : length,
                    context + start * hidden + head * head_width);
        }
      }, sequences > 1 ? 4 * sequences : encoder.heads);
    }
  }

  // What follows attention in block i - 1, and the queries, keys and values of block i, of rows from `first`.
  void compute_rows(int64_t i, int64_t first, int number, Team& team, Scratch& scratch) {
    const int words = hidden / numbers_in_word(type);
    const Inputs own = {inputs.words + first * words, inputs.scales + first, inputs.zeros + first};
    float* residual = x + first * hidden;
    auto each_row = [&](auto function) {
      team.share(number, [&](int from, int to) { for (int64_t row = from; row < to; row++) function(row); });
    };
    auto to_result = [&](int64_t row, int column, Floats y) __attribute__((always_inline)) {
      store(scratch.result + row * hidden + column, y);
    };
    // x ← norm(x + y), and inputs of the next product; or, pre-norm, x ← x + y, and inputs norm(x).
    auto end_sublayer = [&](const float* y, const Norm* post_norm, const Norm* pre_norm, const Linear* next) {
      each_row([&](int64_t row) {
        float *sum = residual + row * hidden, *normalized = scratch.normalized + row * hidden;
        for (int64_t column = 0; y && column < hidden; column += 16)
          store(sum + column, load(sum + column) + load(y + row * hidden + column));
        if (y && !encoder.norm_first) normalize(sum, hidden, *post_norm, encoder.epsilon, sum);
        if (!next) return;
        if (encoder.norm_first) normalize(sum, hidden, *pre_norm, encoder.epsilon, normalized);
        convert<type>(encoder.norm_first ? normalized : sum, hidden, next->input_factors, own, row);
      });
    };
    const Block* block = i < encoder.number ? encoder.blocks + i : nullptr;
    const Norm* next_norm = block ? &block->attention_norm : nullptr;
    const Linear* next = block ? &block->query_key_value : nullptr;
    if (i == 0) {
      end_sublayer(nullptr, nullptr, next_norm, next);
    } else {
      const Block& last = encoder.blocks[i - 1];
      const float* attended = context + first * hidden;
      each_row([&](int64_t row) {
        convert<type>(attended + row * hidden, hidden, last.attention_output.input_factors, scratch.context_inputs, row);
      });
      multiply<type>(team, scratch.context_inputs, number, last.attention_output, to_result);
      end_sublayer(scratch.result, &last.attention_norm, &last.output_norm, &last.intermediate);
      multiply<type>(team, own, number, last.intermediate,
                     [&](int64_t row, int column, Floats y) __attribute__((always_inline)) {
                       store(scratch.inner + row * inner + column, activate(y));
                     });
      if (type != FLOAT32)
        each_row([&](int64_t row) {
          convert<type>(scratch.inner + row * inner, inner, last.output.input_factors, scratch.inner_inputs, row);
        });
      multiply<type>(team, scratch.inner_inputs, number, last.output, to_result);
      end_sublayer(scratch.result, &last.output_norm, next_norm, next);
    }
    if (block)
      multiply<type>(team, own, number, *next, [&](int64_t row, int column, Floats y) __attribute__((always_inline)) {
        store(projected + (first + row) * 3 * hidden + column, y);
      });
  }

  INLINE Floats activate(Floats y) const {
    return encoder.activation == GELU ? gelu(y) : encoder.activation == RELU ? maximum(all(0), y) : gelu_tanh(y);
  }
};

template <Type type>
void encode(const Encoder& encoder, float* x, const int32_t* starts, const int32_t* keys, int sequences, int threads) {
  std::vector<int32_t> own;
  for (int first = 0, last; first < sequences; first = last) {
    for (last = first + 1; last < sequences && starts[last + 1] - starts[first] <= ROWS_OF_PASS;) last++;
    own.clear();
    for (int i = first; i <= last; i++) own.push_back(starts[i] - starts[first]);
    float* rows = x + starts[first] * encoder.hidden;
    const int32_t* own_keys = keys ? keys + first : nullptr;
    if (own.back()) Pass<type>(encoder, rows, own.data(), own_keys, last - first, threads).run();
  }
}

inline bool fits(const Linear& linear, int64_t inputs, int64_t outputs, Type type) {
  const bool is_complete = linear.panels && linear.bias && (type != INT8 || (linear.scales && linear.sums));
  return is_complete && linear.inputs == inputs && linear.outputs == outputs;
}

inline bool is_valid(const Encoder& encoder, int64_t rows, const int32_t* starts, const int32_t* keys,
                     int64_t sequences) {
  const int64_t hidden = encoder.hidden, inner = encoder.inner;
  if (encoder.size != sizeof(Encoder) || encoder.type < FLOAT32 || encoder.type > INT8) return false;
  if (encoder.activation < GELU || encoder.activation > RELU || encoder.number < 0 || encoder.heads < 1) return false;
  if (hidden < PANEL || hidden % PANEL || inner < PANEL || inner % PANEL || hidden % (16 * encoder.heads)) return false;
  for (int64_t i = 0; i < encoder.number; i++) {
    const Block& block = encoder.blocks[i];
    if (!fits(block.query_key_value, hidden, 3 * hidden, encoder.type)) return false;
    if (!fits(block.attention_output, hidden, hidden, encoder.type)) return false;
    if (!fits(block.intermediate, hidden, inner, encoder.type)) return false;
    if (!fits(block.output, inner, hidden, encoder.type)) return false;
  }
  if (sequences < 0 || starts[0] != 0 || starts[sequences] != rows) return false;
  for (int64_t i = 0; i < sequences; i++)
    if (starts[i + 1] < starts[i] || (keys && (keys[i] < 0 || keys[i] > starts[i + 1] - starts[i]))) return false;
  return true;
}

// Compute the stack in place: `x` is `(rows, hidden)`; `starts` has the first row of each sequence, and the end; `keys`, if
// it is not null, the number of its rows that are no padding, which come first. Returns 0, INVALID or NO_MEMORY.
extern "C" __attribute__((visibility("default"))) int scratchbert_encode(const Encoder* encoder, float* x, int64_t rows, const int32_t* starts,
                                  const int32_t* keys, int64_t sequences, int64_t threads) {
  if (!encoder || !x || !starts || threads < 1 || !is_valid(*encoder, rows, starts, keys, sequences)) return INVALID;
  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x1f80);  // round to nearest, and keep denormal numbers
  try {
    auto* run = encoder->type == INT8 ? encode<INT8> : encoder->type == BFLOAT16 ? encode<BFLOAT16> : encode<FLOAT32>;
    run(*encoder, x, starts, keys, sequences, threads);
  } catch (const std::bad_alloc&) {
    _mm_setcsr(control);
    return NO_MEMORY;
  }
  _mm_setcsr(control);
  return 0;
}
