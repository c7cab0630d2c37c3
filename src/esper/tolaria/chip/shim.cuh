// One source, two machines: CUDA by NVRTC, or C++ in which a block of threads is a loop.
//
// A phase is `FOR(i, count) { ... } SYNC();`. Every element that a phase writes is owned by one i, and
// its sum runs in a fixed order, so the same run twice is the same to the bit. Sums over samples are
// shared by neighbouring threads, which in C++ are one. `REAL` and `THREADS` are defined by whoever
// compiles this.
//
// What every sample has a number of is in `Values`, cells of `many`: of TOGETHER neighbouring samples,
// which is one on a GPU, where neighbouring threads take neighbouring samples, and in C++ what a vector
// register holds. CHUNK cells are CHUNK_SAMPLES samples, and some that are not there.
//
// Loops are unrolled as far as their loads can wait for each other and no further: code that runs once
// takes longer to be fetched than to be computed.
#pragma once

typedef REAL real;
typedef long long whole;

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define CONSTANT __constant__
#define APART __device__ __noinline__ // one copy, so that switches over many seeds stay small
#define FOR(i, count) _Pragma("unroll 1") for (int i = threadIdx.x; i < (count); i += THREADS)
#define EACH(i, count) _Pragma("unroll 4") for (int i = threadIdx.x; i < (count); i += THREADS)
#define FOR_WARPS(i, count)                                                                          \
  _Pragma("unroll 1") for (int i = threadIdx.x / LANES; i < (count); i += WARPS)
#define LANE int(threadIdx.x % LANES)
#define SYNC() __syncthreads()
#define AS_TEXT(text) #text
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(times) _Pragma(AS_TEXT(unroll times))
#define ROLLED _Pragma("unroll 1")
#define READ(place) __ldg(&(place)) // of what nobody writes during a launch
#define ADD_ALONE(place, value) atomicAdd(&(place), value) // by one thread, that does not wait for it
const int LANES = 32;

// Numbers in a block's own memory. As places in it they take one register, and the compiler knows
// which memory it is.
extern __shared__ double chip_memory[];
struct Cells {
  int at;
  DEVICE real &operator[](int i) const { return ((real *)chip_memory)[at + i]; }
  DEVICE real &operator*() const { return (*this)[0]; }
  DEVICE Cells operator+(int i) const { return Cells{at + i}; }
  DEVICE int operator-(Cells other) const { return at - other.at; }
  DEVICE bool operator!=(Cells other) const { return at != other.at; }
  DEVICE explicit operator bool() const { return at >= 0; }
};
#define NOWHERE Cells{-1}

typedef real many;
typedef Cells Values;
const int TOGETHER = 1;
DEVICE many spread(real value) { return value; }
DEVICE real total(many value) { return value; }
DEVICE real &sample(Values cells, int i) { return cells[i]; } // the number of the i-th sample
DEVICE many samples_at(int i) { return real(i); }             // which samples a cell has numbers of
const int ENOUGH = THREADS * 3 / 8; // threads that keep the memory busy
const int TILE = 2;                 // a thread's outputs of a sum over samples, where it has several
#else
#include <cmath>
#include <cstdint>
#include <vector>
using std::erf, std::exp, std::expm1, std::log, std::sqrt, std::tanh;
#define DEVICE static inline __attribute__((always_inline))
#define CONSTANT static const
#define APART static __attribute__((noinline))
#define FOR(i, count) for (int i = 0; i < (count); ++i)
#define EACH(i, count) FOR(i, count)
#define FOR_WARPS(i, count) for (int i = 0; i < (count); ++i)
#define LANE 0
#define SYNC()
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define UNROLL_BY(times)
#define ROLLED
#define READ(place) (place)
#define ADD_ALONE(place, value) (place) += value
const int LANES = 1;
typedef real *Cells;
#define NOWHERE nullptr

#ifdef __AVX512F__
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif
const int TOGETHER = VECTOR_BYTES / sizeof(real);
typedef real many __attribute__((vector_size(VECTOR_BYTES)));
typedef many *Values;
DEVICE many spread(real value) { return many{} + value; }
DEVICE real total(many value) {
  real sum = 0;
  for (int i = 0; i < TOGETHER; ++i) sum += value[i];
  return sum;
}
DEVICE real &sample(Values cells, int i) { return ((real *)cells)[i]; }
DEVICE many samples_at(int i) {
  many found;
  for (int lane = 0; lane < TOGETHER; ++lane) found[lane] = real(i * TOGETHER + lane);
  return found;
}
const int ENOUGH = 1, TILE = 4;
#define SINGLE_float 1
#define SINGLE(type) JOINED(SINGLE_, type)
#define JOINED(one, two) one##two

template <class F> DEVICE many each_of(many x, F f) {
  for (int i = 0; i < TOGETHER; ++i) x[i] = f(x[i]);
  return x;
}
DEVICE many sqrt(many x) { return each_of(x, [](real one) { return std::sqrt(one); }); }
DEVICE many log(many x) { return each_of(x, [](real one) { return std::log(one); }); }
#if SINGLE(REAL)
// exp(x) = 2^n exp(rest) with |rest| <= ln 2 / 2; what is too small or too large is 2^-126 and infinite.
DEVICE many exp(many x) {
  typedef int32_t many_whole __attribute__((vector_size(VECTOR_BYTES)));
  const many least = spread(-87.3f), most = spread(89.0f);
  x = x < least ? least : x > most ? most : x;
  const many shift = spread(12582912.0f), n = (x * 1.44269504f + shift) - shift; // rounds
  const many rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  many sum = spread(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return sum * (many)((__builtin_convertvector(n, many_whole) + 127) << 23);
}
DEVICE many tanh(many x) {
  const many t = exp(-2.0f * (x < 0 ? -x : x)), found = (1.0f - t) / (1.0f + t);
  return x < 0 ? -found : found;
}
DEVICE many erf(many x) { // by a rational approximation, to 1.5e-7
  const many size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
  many sum = spread(1.061405429f);
  sum = sum * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const many found = 1.0f - sum * t * exp(-size * size);
  return x < 0 ? -found : found;
}
#else
DEVICE many exp(many x) { return each_of(x, [](real one) { return std::exp(one); }); }
DEVICE many tanh(many x) { return each_of(x, [](real one) { return std::tanh(one); }); }
DEVICE many erf(many x) { return each_of(x, [](real one) { return std::erf(one); }); }
#endif
#endif
const int CHUNK = (CHUNK_SAMPLES + TOGETHER - 1) / TOGETHER; // cells
const int WARPS = THREADS / LANES;

// A function from small whole numbers.
#define TABLE(name, ...)                                                                             \
  CONSTANT int name##_numbers[] = {__VA_ARGS__};                                                     \
  DEVICE int name(int k) { return name##_numbers[k]; }

template <class T> DEVICE constexpr T smaller(T a, T b) { return a < b ? a : b; }

DEVICE constexpr int parts_of(int count, int most) { return (count + most - 1) / most; }
// Of `count` things cut into as few parts as `most` in each allows, all alike: how many in one.
DEVICE constexpr int share_of(int count, int most) {
  return (count + parts_of(count, most) - 1) / parts_of(count, most);
}
DEVICE constexpr int power_above(int count) { return count <= 1 ? 1 : 2 * power_above((count + 1) / 2); }

// The sum over as many neighbouring lanes of a warp, in each of them.
template <int COUNT = LANES, class T> DEVICE T lanes_sum(T value) {
#ifdef __CUDACC__
  UNROLL
  for (int apart = COUNT / 2; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
#endif
  return value;
}

// How many neighbouring threads share each of `items` sums: as many as keep most threads busy.
DEVICE constexpr int sharers_of(int items) {
  int sharers = LANES;
  while (sharers > 1 && items * sharers > THREADS) sharers /= 2;
  return sharers;
}

// For each item, T sums over terms: `term(item, first, step, sums)` adds those from `first` on, every
// `step`th; `store(item, t, sum)` has the t-th. Threads that share an item halve what they still hold
// until nothing is left to add.
template <int ITEMS, int T, class Term, class Store> DEVICE void share_sums(Term term, Store store) {
  constexpr int SHARERS = sharers_of(ITEMS), W = power_above(T);
  FOR(k, parts_of(ITEMS * SHARERS, LANES) * LANES) {
    const int item = smaller(k / SHARERS, ITEMS - 1), own = k % SHARERS;
    many sums[W];
    UNROLL
    for (int t = 0; t < W; ++t) sums[t] = many{};
    term(item, own, SHARERS, sums);
    int first = 0; // of the sums that this thread holds
#ifdef __CUDACC__
    UNROLL
    for (int level = 1; level < SHARERS; level *= 2) {
      const int apart = SHARERS / 2 / level, kept = W / 2 / level;
      if (kept) {
        const bool upper = own & apart;
        UNROLL
        for (int t = 0; t < kept; ++t) {
          const real given = upper ? sums[t] : sums[t + kept], stays = upper ? sums[t + kept] : sums[t];
          sums[t] = stays + __shfl_xor_sync(~0u, given, apart);
        }
        first += upper ? kept : 0;
      } else {
        sums[0] += __shfl_xor_sync(~0u, sums[0], apart);
      }
    }
    if (k >= ITEMS * SHARERS || (SHARERS > W && own % (SHARERS > W ? SHARERS / W : 1))) continue;
#endif
    constexpr int HELD = W > SHARERS ? W / SHARERS : 1;
    UNROLL
    for (int t = 0; t < HELD; ++t)
      if (T == W || first + t < T) store(item, first + t, total(sums[t]));
  }
}

// *out += the sum over j < terms of term(j) and over its samples, by all threads. `scratch` holds WARPS numbers.
template <class Term> DEVICE void add_sum(int terms, Cells scratch, Cells out, Term term) {
  many sums = many{};
  FOR(j, terms) sums += term(j);
  real sum = total(sums);
#ifdef __CUDACC__
  sum = lanes_sum(sum);
  if (LANE == 0) scratch[threadIdx.x / LANES] = sum;
  SYNC();
  sum = lanes_sum(LANE < WARPS ? scratch[LANE] : real(0));
#endif
  FOR(i, 1) *out += sum;
  SYNC();
}
