// Layers, forward and backward, over the samples of a chunk.
//
// Element e of the samples of cell b is at e * CHUNK + b: neighbouring threads take neighbouring samples,
// so that they read side by side and share weights. Sizes are template arguments. Where there are fewer
// samples than room, the rest are zeros with gradients of zero, which add nothing to any sum.
//
// A thread computes several outputs of a sample in registers from inputs that it reads once, as many as
// leave enough work for all threads; a sum over samples is shared by neighbouring threads.
//
// Backward functions add to the gradients of parameters, unless these are null: then nothing is
// learned. They write, or with `add` add to, the gradient of their input, unless that is null: then
// nobody needs it.
#pragma once
#include "shim.cuh"

const int MOST_OUTPUTS = 8; // that a thread computes at once
const int MOST_TAPS = 8;    // of a kernel that are unrolled

// Of `count` outputs at each of `places`: how many a thread computes.
DEVICE constexpr int outputs_each(int count, int places) {
  int outputs = share_of(count, MOST_OUTPUTS);
  while (outputs > 1 && places * parts_of(count, outputs) < ENOUGH)
    outputs = share_of(count, outputs - 1);
  return outputs;
}
DEVICE constexpr int loop_by(int outputs) { return outputs >= 8 ? 2 : outputs >= 4 ? 4 : 8; }

// The last of several tiles may go beyond what there is; it computes the last thing again then.
template <bool EVEN> DEVICE int within(int place, int last) {
  return EVEN || place < last ? place : last;
}

DEVICE void put(Values place, many value, bool add) {
  const many before = *place; // read in any case, which is shorter than a way around it
  *place = add ? before + value : value;
}

// --- y[r, o] = bias[o] + sum over i of w[o, i] x[r, i], for R rows of each sample -----------------
// XR, XI, YR, YI: strides of rows and of items in them.

// y = bias + w x, where `w` has strides WO of outputs, WI of inputs. A thread has Q rows of a sample.
template <int R, int I, int O, int XR, int XI, int YR, int YI, int WO, int WI>
DEVICE void linear_rows(Cells w, Cells bias, Values x, Values y, bool add) {
  constexpr int Q = R > 1 ? 2 : 1, PLACES = CHUNK * parts_of(R, Q);
  constexpr int T = outputs_each(O, PLACES), TILES = parts_of(O, T), BY = loop_by(T);
  FOR(k, PLACES * TILES) {
    const int b = k % CHUNK, r = k / CHUNK % parts_of(R, Q) * Q, first = TILES > 1 ? k / PLACES * T : 0;
    many sums[Q * T];
    UNROLL
    for (int t = 0; t < T; ++t) {
      const many start = spread(bias ? bias[within<O % T == 0>(first + t, O - 1)] : real(0));
      UNROLL
      for (int q = 0; q < Q; ++q) sums[q * T + t] = start;
    }
    UNROLL_BY(BY)
    for (int i = 0; i < I; ++i) {
      many in[Q];
      UNROLL
      for (int q = 0; q < Q; ++q)
        in[q] = x[(within<R % Q == 0>(r + q, R - 1) * XR + i * XI) * CHUNK + b];
      UNROLL
      for (int t = 0; t < T; ++t) {
        const real weight = w[within<O % T == 0>(first + t, O - 1) * WO + i * WI];
        UNROLL
        for (int q = 0; q < Q; ++q) sums[q * T + t] += weight * in[q];
      }
    }
    UNROLL
    for (int t = 0; t < Q * T; ++t) {
      const int row = r + t / T, o = first + t % T;
      if ((R % Q == 0 || row < R) && (O % T == 0 || o < O))
        put(y + (row * YR + o * YI) * CHUNK + b, sums[t], add);
    }
  }
}

template <int R, int I, int O, int XR, int XI, int YR, int YI>
APART void linear_forward(Cells w, Cells bias, Values x, Values y) {
  linear_rows<R, I, O, XR, XI, YR, YI, I, 1>(w, bias, x, y, false);
  SYNC();
}

template <int R, int I, int O, int XR, int XI, int YR, int YI>
APART void linear_backward(Cells w, Cells gw, Cells gbias, Values x, Values gy, Values gx, bool add) {
  if (gw) { // a tile is TO outputs by TI inputs, and by a one for the bias
    constexpr int TO = share_of(O, R > 1 ? TILE : 4), TI = R > 1 || TOGETHER > 1 ? share_of(I, 4) : 1;
    constexpr int ACROSS = parts_of(I, TI), WIDE = TI + 1;
    share_sums<parts_of(O, TO) * ACROSS, TO * WIDE>(
        [&](int tile, int start, int step, many *sums) {
          const int first_o = tile / ACROSS * TO, first_i = tile % ACROSS * TI;
          UNROLL_BY(2)
          for (int j = start; j < CHUNK * R; j += step) {
            const int b = R > 1 ? j % CHUNK : j, r = R > 1 ? j / CHUNK : 0;
            many in[TI];
            UNROLL
            for (int i = 0; i < TI; ++i)
              in[i] = x[(r * XR + within<I % TI == 0>(first_i + i, I - 1) * XI) * CHUNK + b];
            UNROLL
            for (int o = 0; o < TO; ++o) {
              const many g = gy[(r * YR + within<O % TO == 0>(first_o + o, O - 1) * YI) * CHUNK + b];
              UNROLL
              for (int i = 0; i < TI; ++i) sums[o * WIDE + i] += g * in[i];
              sums[o * WIDE + TI] += g;
            }
          }
        },
        [&](int tile, int t, real sum) {
          const int o = tile / ACROSS * TO + t / WIDE, i = tile % ACROSS * TI + t % WIDE;
          if (O % TO && o >= O) return;
          if (t % WIDE == TI) {
            if (gbias && tile % ACROSS == 0) gbias[o] += sum;
          } else if (I % TI == 0 || i < I) {
            gw[o * I + i] += sum;
          }
        });
  }
  if (gx) linear_rows<R, O, I, YR, YI, XR, XI, 1, I>(w, NOWHERE, gy, gx, add);
  SYNC();
}

// --- convolution of [C, L] with kernels [O, C / G, K] to [O, M], strided by S, padded with P zeros --

// A thread has Q positions of a sample, and reads what they see once.
template <int C, int L, int O, int K, int M, int S, int P, int G>
APART void conv_forward(Cells w, Cells bias, Values x, Values y) {
  constexpr int CG = C / G, OG = O / G, Q = M > 1 ? 2 : 1, BASES = parts_of(M, Q);
  constexpr int T = outputs_each(OG, CHUNK * BASES * G), TILES = parts_of(OG, T);
  constexpr int TK = share_of(K, MOST_TAPS), SEEN = (Q - 1) * S + TK;
  FOR(k, CHUNK * BASES * G * TILES) {
    const int b = k % CHUNK, m = k / CHUNK % BASES * Q, tile = G * TILES > 1 ? k / (CHUNK * BASES) : 0;
    const int group = tile / TILES, first = group * OG + tile % TILES * T, last = (group + 1) * OG - 1;
    many sums[Q * T];
    UNROLL
    for (int t = 0; t < T; ++t) {
      const many start = spread(bias ? bias[within<OG % T == 0>(first + t, last)] : real(0));
      UNROLL
      for (int q = 0; q < Q; ++q) sums[q * T + t] = start;
    }
    ROLLED
    for (int piece = 0; piece < CG * parts_of(K, TK); ++piece) {
      const int c = piece / parts_of(K, TK), early = piece % parts_of(K, TK) * TK;
      Values own = x + (group * CG + c) * L * CHUNK + b;
      many in[SEEN];
      UNROLL
      for (int each = 0; each < SEEN; ++each) {
        const int p = m * S - P + early + each;
        in[each] = p >= 0 && p < L ? own[p * CHUNK] : many{};
      }
      UNROLL
      for (int tap = 0; tap < TK; ++tap) {
        if (K % TK && early + tap >= K) continue;
        UNROLL
        for (int t = 0; t < T; ++t) {
          const real weight = w[(within<OG % T == 0>(first + t, last) * CG + c) * K + early + tap];
          UNROLL
          for (int q = 0; q < Q; ++q) sums[q * T + t] += weight * in[q * S + tap];
        }
      }
    }
    UNROLL
    for (int t = 0; t < Q * T; ++t) {
      const int o = first + t % T;
      if ((OG % T == 0 || o <= last) && (M % Q == 0 || m + t / T < M))
        y[(o * M + m + t / T) * CHUNK + b] = sums[t];
    }
  }
  SYNC();
}

// Which output sees the position S * base + apart by a tap, counted from base; and that position.
DEVICE constexpr int apart_of(int tap, int S, int P) { return ((tap - P) % S + S) % S; }
DEVICE constexpr int lag_of(int tap, int S, int P) { return (apart_of(tap, S, P) + P - tap) / S; }

template <int C, int L, int O, int K, int M, int S, int P, int G>
APART void conv_backward(Cells w, Cells gw, Cells gbias, Values x, Values gy, Values gx, bool add) {
  constexpr int CG = C / G, OG = O / G;
  if (gw) { // a tile is TO outputs by TK taps of one channel, and by a one for the bias
    constexpr int TK = share_of(K, MOST_TAPS), PIECES = parts_of(K, TK), WIDE = TK + 1;
    constexpr int TO = G * OG * CG * PIECES >= THREADS / 8 || TOGETHER > 1 ? share_of(OG, TILE) : 1;
    constexpr int TILES = parts_of(OG, TO);
    share_sums<G * TILES * CG * PIECES, TO * WIDE>(
        [&](int tile, int start, int step, many *sums) {
          const int c = tile / PIECES % CG, row = tile / (PIECES * CG), group = row / TILES;
          const int first_o = group * OG + row % TILES * TO, last = (group + 1) * OG - 1;
          Values line = x + (group * CG + c) * L * CHUNK;
          ROLLED
          for (int j = start; j < CHUNK * M; j += step) {
            const int b = j % CHUNK, from = j / CHUNK * S - P + tile % PIECES * TK;
            many in[TK];
            UNROLL
            for (int tap = 0; tap < TK; ++tap) {
              const int p = from + tap;
              in[tap] = p >= 0 && p < L ? line[p * CHUNK + b] : many{};
            }
            UNROLL
            for (int o = 0; o < TO; ++o) {
              const many g = gy[within<OG % TO == 0>(first_o + o, last) * M * CHUNK + j];
              UNROLL
              for (int tap = 0; tap < TK; ++tap) sums[o * WIDE + tap] += g * in[tap];
              sums[o * WIDE + TK] += g;
            }
          }
        },
        [&](int tile, int t, real sum) {
          const int c = tile / PIECES % CG, row = tile / (PIECES * CG);
          const int inside = row % TILES * TO + t / WIDE;
          const int o = row / TILES * OG + inside, tap = tile % PIECES * TK + t % WIDE;
          if (OG % TO && inside >= OG) return;
          if (t % WIDE == TK) {
            if (gbias && tile % (PIECES * CG) == 0) gbias[o] += sum;
          } else if (K % TK == 0 || tap < K) {
            gw[(o * CG + c) * K + tap] += sum;
          }
        });
  }
  if (gx) { // a thread has Q * S neighbours, so that all threads meet the same taps
    constexpr int Q = S == 1 && L > 1 ? 2 : 1, NEAR = Q * S, BASES = parts_of(L, NEAR);
    constexpr int T = outputs_each(CG, CHUNK * BASES * G), TILES = parts_of(CG, T);
    constexpr int LOW = lag_of(K - 1, S, P), SEEN = lag_of(0, S, P) - LOW + Q;
    FOR(k, CHUNK * BASES * G * TILES) {
      const int b = k % CHUNK, base = k / CHUNK % BASES * Q;
      const int tile = G * TILES > 1 ? k / (CHUNK * BASES) : 0;
      const int group = tile / TILES, first = tile % TILES * T;
      many sums[NEAR * T];
      UNROLL
      for (int t = 0; t < NEAR * T; ++t) sums[t] = many{};
      ROLLED
      for (int o = group * OG; o < (group + 1) * OG; ++o) {
        Values own = gy + o * M * CHUNK + b;
        Cells taps = w + o * CG * K;
        many in[SEEN];
        UNROLL
        for (int each = 0; each < SEEN; ++each) {
          const int m = base + LOW + each;
          in[each] = m >= 0 && m < M ? own[m * CHUNK] : many{};
        }
        UNROLL
        for (int tap = 0; tap < K; ++tap) {
          const int apart = apart_of(tap, S, P), seen = lag_of(tap, S, P) - LOW;
          UNROLL
          for (int t = 0; t < T; ++t) {
            const real weight = taps[within<CG % T == 0>(first + t, CG - 1) * K + tap];
            UNROLL
            for (int q = 0; q < Q; ++q) sums[(q * S + apart) * T + t] += weight * in[seen + q];
          }
        }
      }
      UNROLL
      for (int t = 0; t < NEAR * T; ++t) {
        const int p = base * S + t / T, c = first + t % T;
        if ((L % NEAR == 0 || p < L) && (CG % T == 0 || c < CG))
          put(gx + ((group * CG + c) * L + p) * CHUNK + b, sums[t], add);
      }
    }
  }
  SYNC();
}

// --- convolution of planes [C, H, W] with squares [O, C / G, K, K] to [O, HO, WO] --------------------

// The planes are small: a thread has one place of the output and T channels of it.
template <int C, int H, int W, int O, int K, int HO, int WO, int S, int P, int G>
APART void plane_forward(Cells w, Cells bias, Values x, Values y) {
  constexpr int CG = C / G, OG = O / G, M = HO * WO;
  constexpr int T = outputs_each(OG, CHUNK * M * G), TILES = parts_of(OG, T);
  FOR(k, CHUNK * M * G * TILES) {
    const int b = k % CHUNK, m = k / CHUNK % M, tile = k / (CHUNK * M);
    const int group = tile / TILES, first = group * OG + tile % TILES * T, last = (group + 1) * OG - 1;
    many sums[T];
    UNROLL
    for (int t = 0; t < T; ++t)
      sums[t] = spread(bias ? bias[within<OG % T == 0>(first + t, last)] : real(0));
    ROLLED
    for (int each = 0; each < CG * K; ++each) { // a line of taps
      const int c = each / K, u = each % K, p = m / WO * S - P + u;
      if (p < 0 || p >= H) continue;
      Values own = x + ((group * CG + c) * H + p) * W * CHUNK + b;
      UNROLL
      for (int v = 0; v < K; ++v) {
        const int q = m % WO * S - P + v;
        const many in = q >= 0 && q < W ? own[q * CHUNK] : many{};
        UNROLL
        for (int t = 0; t < T; ++t)
          sums[t] += w[((within<OG % T == 0>(first + t, last) * CG + c) * K + u) * K + v] * in;
      }
    }
    UNROLL
    for (int t = 0; t < T; ++t)
      if (OG % T == 0 || first + t <= last) y[((first + t) * M + m) * CHUNK + b] = sums[t];
  }
  SYNC();
}

template <int C, int H, int W, int O, int K, int HO, int WO, int S, int P, int G>
APART void plane_backward(Cells w, Cells gw, Cells gbias, Values x, Values gy, Values gx, bool add) {
  constexpr int CG = C / G, OG = O / G, M = HO * WO;
  constexpr bool FEW = TOGETHER > 1; // threads; a GPU has more of them than there are lines of taps
  if (gw) { // an item is a line of taps of TO outputs, and a one for the bias of each
    constexpr int TO = FEW ? share_of(OG, TILE) : 1, TILES = parts_of(OG, TO), WIDE = K + 1;
    share_sums<G * TILES * CG * K, TO * WIDE>(
        [&](int item, int start, int step, many *sums) {
          const int u = item % K, row = item / (K * CG), group = row / TILES;
          const int c = group * CG + item / K % CG;
          const int first = group * OG + row % TILES * TO, last = (group + 1) * OG - 1;
          ROLLED
          for (int j = start; j < CHUNK * M; j += step) {
            const int b = j % CHUNK, m = j / CHUNK, p = m / WO * S - P + u;
            const bool inside = p >= 0 && p < H;
            many in[K];
            UNROLL
            for (int v = 0; v < K; ++v) {
              const int q = m % WO * S - P + v;
              in[v] = inside && q >= 0 && q < W ? x[((c * H + p) * W + q) * CHUNK + b] : many{};
            }
            UNROLL
            for (int o = 0; o < TO; ++o) {
              const many g = gy[within<OG % TO == 0>(first + o, last) * M * CHUNK + j];
              UNROLL
              for (int v = 0; v < K; ++v) sums[o * WIDE + v] += g * in[v];
              sums[o * WIDE + K] += g;
            }
          }
        },
        [&](int item, int t, real sum) {
          const int u = item % K, c = item / K % CG, row = item / (K * CG);
          const int own = row % TILES * TO + t / WIDE, o = row / TILES * OG + own, v = t % WIDE;
          if (OG % TO && own >= OG) return;
          if (v < K) gw[((o * CG + c) * K + u) * K + v] += sum;
          else if (gbias && u == 0 && c == 0) gbias[o] += sum;
        });
  }
  if (gx) { // a thread has T channels of one place
    constexpr int T = FEW ? share_of(CG, MOST_OUTPUTS) : 1, TILES = parts_of(CG, T);
    FOR(k, CHUNK * H * W * G * TILES) {
      const int b = k % CHUNK, q = k / CHUNK % W, p = k / (CHUNK * W) % H, tile = k / (CHUNK * H * W);
      const int group = tile / TILES, first = tile % TILES * T;
      many sums[T];
      UNROLL
      for (int t = 0; t < T; ++t) sums[t] = many{};
      ROLLED
      for (int each = 0; each < OG * K; ++each) {
        const int o = group * OG + each / K, u = each % K, up = p + P - u;
        if (up < 0 || up % S || up / S >= HO) continue;
        UNROLL
        for (int v = 0; v < K; ++v) {
          const int left = q + P - v;
          if (left < 0 || left % S || left / S >= WO) continue;
          const many g = gy[(o * M + up / S * WO + left / S) * CHUNK + b];
          UNROLL
          for (int t = 0; t < T; ++t)
            sums[t] += w[((o * CG + within<CG % T == 0>(first + t, CG - 1)) * K + u) * K + v] * g;
        }
      }
      UNROLL
      for (int t = 0; t < T; ++t)
        if (CG % T == 0 || first + t < CG)
          put(gx + (((group * CG + first + t) * H + p) * W + q) * CHUNK + b, sums[t], add);
    }
  }
  SYNC();
}

// --- elementwise over SIZE numbers of each sample, in place; their slope is known from y ----------

template <int SIZE> APART void leaky_forward(real slope, Values y) {
  EACH(k, CHUNK * SIZE) y[k] = y[k] > many{} ? y[k] : slope * y[k];
  SYNC();
}

template <int SIZE> APART void leaky_backward(real slope, Values y, Values g) {
  EACH(k, CHUNK * SIZE) g[k] = y[k] > many{} ? g[k] : slope * g[k];
  SYNC();
}

template <int SIZE> APART void tanh_forward(Values y) {
  EACH(k, CHUNK * SIZE) y[k] = tanh(y[k]);
  SYNC();
}

template <int SIZE> APART void tanh_backward(Values y, Values g) {
  EACH(k, CHUNK * SIZE) g[k] *= real(1) - y[k] * y[k];
  SYNC();
}

// --- y = x P(x), of the normal distribution's P and density -----------------------------------------

DEVICE many below(many x) { return real(0.5) * (real(1) + erf(x * real(0.70710678118654752))); }
DEVICE many density(many x) { return real(0.39894228040143268) * exp(real(-0.5) * x * x); }

template <int SIZE> APART void gelu_forward(Values x, Values y) {
  EACH(k, CHUNK * SIZE) y[k] = x[k] * below(x[k]);
  SYNC();
}

template <int SIZE> APART void gelu_backward(Values x, Values gy, Values gx, bool add) {
  if (!gx) return;
  EACH(k, CHUNK * SIZE) put(gx + k, gy[k] * (below(x[k]) + x[k] * density(x[k])), add);
  SYNC();
}

// --- moving values: y = x, y = x - h --------------------------------------------------------------

template <int SIZE> APART void copy_forward(Values x, Values y) {
  EACH(k, CHUNK * SIZE) y[k] = x[k];
  SYNC();
}

template <int SIZE> APART void copy_backward(Values gy, Values gx, bool add) {
  if (!gx) return;
  EACH(k, CHUNK * SIZE) put(gx + k, gy[k], add);
  SYNC();
}

template <int SIZE> APART void minus_forward(Values x, Values h, Values y) {
  EACH(k, CHUNK * SIZE) y[k] = x[k] - h[k];
  SYNC();
}

template <int SIZE>
APART void minus_backward(Values gy, Values gx, bool addx, Values gh, bool addh) {
  if (gx) EACH(k, CHUNK * SIZE) put(gx + k, gy[k], addx);
  if (gh) EACH(k, CHUNK * SIZE) put(gh + k, -gy[k], addh);
  SYNC();
}

// --- y = weight x, for one learned number --------------------------------------------------------

template <int SIZE> APART void scalar_forward(Cells w, Values x, Values y) {
  EACH(k, CHUNK * SIZE) y[k] = *w * x[k];
  SYNC();
}

template <int SIZE>
APART void scalar_backward(Cells w, Cells gw, Values x, Values gy, Values gx, bool add, Cells scratch) {
  if (gw)
    add_sum(CHUNK * SIZE, scratch, gw, [&](int j) { return gy[j] * x[j]; });
  if (!gx) return;
  EACH(k, CHUNK * SIZE) put(gx + k, *w * gy[k], add);
  SYNC();
}

// --- y[c, l] = h[c, l] s[c] -----------------------------------------------------------------------

template <int C, int L> APART void channels_forward(Values h, Values s, Values y) {
  EACH(k, CHUNK * C * L) y[k] = h[k] * s[k / (L * CHUNK) * CHUNK + k % CHUNK];
  SYNC();
}

template <int C, int L>
APART void channels_backward(Values h, Values s, Values gy, Values gh, bool addh, Values gs, bool adds) {
  if (gh)
    EACH(k, CHUNK * C * L) put(gh + k, gy[k] * s[k / (L * CHUNK) * CHUNK + k % CHUNK], addh);
  if (gs)
    FOR(k, CHUNK * C) {
      const int start = k / CHUNK * L * CHUNK + k % CHUNK;
      many sum = many{};
      UNROLL_BY(4)
      for (int l = 0; l < L; ++l) sum += gy[start + l * CHUNK] * h[start + l * CHUNK];
      put(gs + k, sum, adds);
    }
  SYNC();
}

// --- pooling over all positions: [C, L] to [C] ----------------------------------------------------

template <int C, int L> APART void mean_forward(Values x, Values y) {
  FOR(k, CHUNK * C) {
    Values own = x + k / CHUNK * L * CHUNK + k % CHUNK;
    many sum = many{};
    UNROLL_BY(4)
    for (int l = 0; l < L; ++l) sum += own[l * CHUNK];
    y[k] = sum / real(L);
  }
  SYNC();
}

template <int C, int L> APART void mean_backward(Values gy, Values gx, bool add) {
  if (!gx) return;
  EACH(k, CHUNK * C * L) put(gx + k, gy[k / (L * CHUNK) * CHUNK + k % CHUNK] / real(L), add);
  SYNC();
}

template <int C, int L> APART void max_forward(Values x, Values y) {
  FOR(k, CHUNK * C) {
    Values own = x + k / CHUNK * L * CHUNK + k % CHUNK;
    many most = own[0];
    UNROLL_BY(4)
    for (int l = 1; l < L; ++l) { // a NaN is passed on, as torch does
      const many here = own[l * CHUNK];
      most = (here > most) | (here != here) ? here : most;
    }
    y[k] = most;
  }
  SYNC();
}

template <int C, int L>
APART void max_backward(Values x, Values y, Values gy, Values gx, bool add) {
  if (!gx) return;
  FOR(k, CHUNK * C) {
    const int start = k / CHUNK * L * CHUNK + k % CHUNK;
    const many none = many{}, most = y[k], whole_slope = gy[k];
    auto open = most == most; // the first of equals has it
    UNROLL_BY(4)
    for (int l = 0; l < L; ++l) {
      const auto here = (x[start + l * CHUNK] == most) & open;
      open = open & (x[start + l * CHUNK] != most);
      put(gx + start + l * CHUNK, here ? whole_slope : none, add);
    }
  }
  SYNC();
}

// --- norm over rows of E1 x E2 numbers; row r scales its e1-th part by weight r * W + e1 ----------
// SR, S1, S2: strides. A row is shared by neighbouring threads. `saved` holds mean and 1 / deviation of
// each row.

DEVICE constexpr int row_sharers(int rows, int numbers) {
  int sharers = sharers_of(rows);
  while (sharers > 1 && sharers > numbers) sharers /= 2;
  return sharers;
}

template <int R, int E1, int E2, int W, int SR, int S1, int S2>
APART void norm_forward(real epsilon, Cells w, Cells bias, Values x, Values y, Values saved) {
  constexpr int E = E1 * E2, SHARERS = row_sharers(CHUNK * R, E), ROWS = CHUNK * R * SHARERS;
  FOR(k, parts_of(ROWS, LANES) * LANES) {
    const int row = smaller(k / SHARERS, CHUNK * R - 1), own = k % SHARERS;
    const int b = row % CHUNK, r = row / CHUNK;
    auto place = [&](int e) { return (r * SR + e / E2 * S1 + e % E2 * S2) * CHUNK + b; };
    many mean = many{}, square = many{};
    UNROLL_BY(4)
    for (int e = own; e < E; e += SHARERS) mean += x[place(e)];
    mean = lanes_sum<SHARERS>(mean) / real(E);
    UNROLL_BY(4)
    for (int e = own; e < E; e += SHARERS) {
      const many apart = x[place(e)] - mean;
      square += apart * apart;
    }
    const many scale = real(1) / sqrt(lanes_sum<SHARERS>(square) / real(E) + epsilon);
    if (k >= ROWS) continue;
    UNROLL_BY(2)
    for (int e = own; e < E; e += SHARERS)
      y[place(e)] = (x[place(e)] - mean) * scale * w[r * W + e / E2] + bias[r * W + e / E2];
    if (own) continue;
    saved[2 * r * CHUNK + b] = mean;
    saved[(2 * r + 1) * CHUNK + b] = scale;
  }
  SYNC();
}

template <int R, int E1, int E2, int W, int SR, int S1, int S2>
APART void norm_backward(real epsilon, Cells w, Cells gw, Cells gbias, Values x, Values saved, Values gy,
                         Values gx, bool add) {
  if (gw) { // rows that share weights (W = 0) add up
    constexpr int ALIKE = W ? 1 : R;
    share_sums<W ? R * E1 : E1, 2>(
        [&](int c, int start, int step, many *sums) {
          UNROLL_BY(2)
          for (int j = start; j < CHUNK * ALIKE * E2; j += step) {
            const int b = j % CHUNK, r = W ? c / E1 : j / CHUNK / E2;
            const int at = (r * SR + c % E1 * S1 + j / CHUNK % E2 * S2) * CHUNK + b;
            const many mean = saved[2 * r * CHUNK + b], scale = saved[(2 * r + 1) * CHUNK + b];
            sums[0] += gy[at] * (x[at] - mean) * scale;
            sums[1] += gy[at];
          }
        },
        [&](int c, int t, real sum) { (t ? gbias : gw)[c] += sum; });
  }
  constexpr int E = E1 * E2, SHARERS = row_sharers(CHUNK * R, E), ROWS = CHUNK * R * SHARERS;
  if (gx)
    FOR(k, parts_of(ROWS, LANES) * LANES) {
      const int row = smaller(k / SHARERS, CHUNK * R - 1), own = k % SHARERS;
      const int b = row % CHUNK, r = row / CHUNK;
      auto place = [&](int e) { return (r * SR + e / E2 * S1 + e % E2 * S2) * CHUNK + b; };
      const many mean = saved[2 * r * CHUNK + b], scale = saved[(2 * r + 1) * CHUNK + b];
      many sum = many{}, along = many{}; // of the gradient of what is normal, and of its product with that
      UNROLL_BY(2)
      for (int e = own; e < E; e += SHARERS) {
        const many g = gy[place(e)] * w[r * W + e / E2];
        sum += g;
        along += g * (x[place(e)] - mean) * scale;
      }
      sum = lanes_sum<SHARERS>(sum) / real(E);
      along = lanes_sum<SHARERS>(along) / real(E);
      if (k >= ROWS) continue;
      UNROLL_BY(2)
      for (int e = own; e < E; e += SHARERS) {
        const many normal = (x[place(e)] - mean) * scale;
        const many g = gy[place(e)] * w[r * W + e / E2];
        put(gx + place(e), scale * (g - sum - normal * along), add);
      }
    }
  SYNC();
}

// --- a blend's gate: y[c, l] = 2 sigmoid(w . x[:, l] + bias) g[c, l] ------------------------------

DEVICE void gate_forward(int C, int L, Cells w, Cells bias, Values x,
                         Values g, Values factor, Values y) {
  FOR(k, CHUNK * L) {
    many sum = spread(*bias);
    for (int c = 0; c < C; ++c) sum += w[c] * x[c * L * CHUNK + k];
    factor[k] = real(2) / (real(1) + exp(-sum));
    for (int c = 0; c < C; ++c) y[c * L * CHUNK + k] = g[c * L * CHUNK + k] * factor[k];
  }
  SYNC();
}

// `gy` becomes the gradient of g. `slope` is room for the gradient of the scores.
DEVICE void gate_backward(int C, int L, Cells w, Cells gw, Cells gbias, Values x,
                          Values g, Values factor, Values slope, Values gy, Values gx) {
  FOR(k, CHUNK * L) {
    many sum = many{};
    for (int c = 0; c < C; ++c) sum += gy[c * L * CHUNK + k] * g[c * L * CHUNK + k];
    slope[k] = sum * factor[k] * (real(1) - factor[k] * real(0.5));
    for (int c = 0; c < C; ++c) {
      gy[c * L * CHUNK + k] *= factor[k];
      if (gx) gx[c * L * CHUNK + k] += slope[k] * w[c];
    }
  }
  SYNC();
  if (!gw) return;
  // C and L are not known to the compiler here: a warp a sum, the last one the bias's.
  FOR_WARPS(c, C + 1) {
    many sums = many{};
    ROLLED
    for (int j = LANE; j < CHUNK * L; j += LANES)
      sums += slope[j] * (c < C ? x[c * L * CHUNK + j] : spread(1));
    const real sum = lanes_sum(total(sums));
    if (LANE == 0) *(c < C ? gw + c : gbias) += sum;
  }
  SYNC();
}
