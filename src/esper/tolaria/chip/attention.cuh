// Attention: y[t] = sum over s of softmax(scale q[t] . k[s]) v[s], for H heads of D, as in `layers.cuh`.
//
// AT, AI: strides of tokens and of items in them. The weights are never kept: `saved` holds the
// logarithm of each row's sum.
#pragma once
#include "layers.cuh"

template <int D> DEVICE many dot(const many *a, const many *b) {
  many sum = many{};
  UNROLL
  for (int d = 0; d < D; ++d) sum += a[d] * b[d];
  return sum;
}

template <int D, int AI> DEVICE void take(many *out, Values from) {
  UNROLL
  for (int d = 0; d < D; ++d) out[d] = from[d * AI * CHUNK];
}

template <int T, int H, int D, int CAUSAL, int AT, int AI>
APART void attend_forward(real scale, Values q, Values k, Values v, Values y, Values saved) {
  FOR(j, CHUNK * T * H) {
    const int b = j % CHUNK, t = j / CHUNK % T, head = j / (CHUNK * T), end = CAUSAL ? t + 1 : T;
    const int start = head * D * AI * CHUNK + b, mine = start + t * AT * CHUNK;
    many query[D], key[D], seen[D];
    take<D, AI>(query, q + mine);
    take<D, AI>(key, k + start);
    many most = scale * dot<D>(query, key), sum = many{};
    UNROLL_BY(2)
    for (int s = 1; s < end; ++s) {
      take<D, AI>(key, k + start + s * AT * CHUNK);
      const many here = scale * dot<D>(query, key);
      most = here > most ? here : most;
    }
    UNROLL
    for (int d = 0; d < D; ++d) seen[d] = many{};
    UNROLL_BY(2)
    for (int s = 0; s < end; ++s) {
      take<D, AI>(key, k + start + s * AT * CHUNK);
      const many p = exp(scale * dot<D>(query, key) - most);
      sum += p;
      UNROLL
      for (int d = 0; d < D; ++d) seen[d] += p * v[start + (s * AT + d * AI) * CHUNK];
    }
    UNROLL
    for (int d = 0; d < D; ++d) y[mine + d * AI * CHUNK] = seen[d] / sum;
    saved[j] = most + log(sum);
  }
  SYNC();
}

template <int T, int H, int D, int CAUSAL, int AT, int AI>
APART void attend_backward(real scale, Values q, Values k, Values v,
                            Values y, Values saved, Values gy, Values gq, bool addq,
                            Values gk, bool addk, Values gv, bool addv) {
  FOR(j, CHUNK * T * H) { // a query
    const int b = j % CHUNK, t = j / CHUNK % T, head = j / (CHUNK * T), end = CAUSAL ? t + 1 : T;
    const int start = head * D * AI * CHUNK + b, mine = start + t * AT * CHUNK;
    many query[D], slope[D], other[D], sums[D];
    take<D, AI>(query, q + mine);
    take<D, AI>(slope, gy + mine);
    take<D, AI>(other, y + mine);
    const many mean = dot<D>(slope, other);
    UNROLL
    for (int d = 0; d < D; ++d) sums[d] = many{};
    UNROLL_BY(2)
    for (int s = 0; s < end; ++s) {
      take<D, AI>(other, v + start + s * AT * CHUNK);
      const many along = dot<D>(slope, other) - mean;
      take<D, AI>(other, k + start + s * AT * CHUNK);
      const many g = scale * exp(scale * dot<D>(query, other) - saved[j]) * along;
      UNROLL
      for (int d = 0; d < D; ++d) sums[d] += g * other[d];
    }
    UNROLL
    for (int d = 0; d < D; ++d) put(gq + mine + d * AI * CHUNK, sums[d], addq);
  }
  FOR(j, CHUNK * T * H) { // a key and its value
    const int b = j % CHUNK, s = j / CHUNK % T, head = j / (CHUNK * T);
    const int start = head * D * AI * CHUNK + b, mine = start + s * AT * CHUNK;
    many key[D], value[D], query[D], slope[D], keys[D], values[D];
    take<D, AI>(key, k + mine);
    take<D, AI>(value, v + mine);
    UNROLL
    for (int d = 0; d < D; ++d) keys[d] = values[d] = many{};
    UNROLL_BY(2)
    for (int t = CAUSAL ? s : 0; t < T; ++t) {
      take<D, AI>(slope, gy + start + t * AT * CHUNK);
      take<D, AI>(query, y + start + t * AT * CHUNK);
      const many along = dot<D>(slope, value) - dot<D>(slope, query);
      take<D, AI>(query, q + start + t * AT * CHUNK);
      const many p = exp(scale * dot<D>(query, key) - saved[(head * T + t) * CHUNK + b]);
      UNROLL
      for (int d = 0; d < D; ++d) {
        keys[d] += scale * p * along * query[d];
        values[d] += p * slope[d];
      }
    }
    UNROLL
    for (int d = 0; d < D; ++d) {
      put(gk + mine + d * AI * CHUNK, keys[d], addk);
      put(gv + mine + d * AI * CHUNK, values[d], addv);
    }
  }
  SYNC();
}
