// One block trains or scores one row: a host with its seeds, over batches, in passes.
//
// A pass is the host with some of its seeds (or shadows) at some strength, from some slot on: the base
// pass of every row, the second pass of isolated seeds, a shadow's, a counterfactual. Passes of a row
// come with the base pass first and then by falling `first`, so that each finds what it shares with
// the base pass still in memory.
//
// The generated source before this says: SLOTS, BLUEPRINTS, HOST_WIDTH, CHUNK_SAMPLES, SCRATCH, CLASSES,
// INPUT_SIZE, PER_SAMPLE, WORK_AT, value_at(k) and gradient_at(k) of the host's values (k = SLOTS: logits), slot_channels(k),
// slot_length(k), slot_neighbours(k) of them in a line, gate_at(k), segment_forward/backward(k, ...), seed_forward/backward(which, ...),
// seed_output(which), seed_output_gradient(which), seed_width(which), seed_room(which), gate_room(k) and
// seed_program(k * BLUEPRINTS + blueprint), which is -1 where it does not fit.
#pragma once
#include "attention.cuh"

enum Argument { // addresses and whole numbers of a launch, in this order
  MODULES, HEADS, PASSES, FACTORS, EFFORTS, QUEUE, INPUTS, LABELS, ORDER, FIRST, RESULTS, NORMS, SETTINGS,
  STATES, POOLS, SHADOWS, SHARES, ASKED, ASKED_STARTS, ROWS, BATCHES, BATCH, SAMPLES, ARENA, MODULE_ROOM,
  PASS_ROOM, IS_STRAIGHT, TRAINING_STAGE, IS_FLOW
};
enum HeadColumn { FIRST_MODULE, MODULE_COUNT, FIRST_PASS, PASS_COUNT, HEAD_COLUMNS }; // of a row
// Of a module: batches that it learns from, place and size in the arena, where its norm goes, addresses
// of its row.
enum ModuleColumn { SHARE, PLACE, WIDTH, NORM, THETA, MOMENT0, MOMENT1, SQUARES, STEPS, RATE, DECAY,
                    ACTIVE, SCALE, LIVE, MODULE_COLUMNS };
enum Setting { IS_ADAM, BETA1, BETA2, EPSILON, LOG_BETA1, LOG_BETA2 }; // of SGD: 0, momentum
template <class T> DEVICE T *at(whole address) { return (T *)address; }
const int PASS_HEAD = 5, SLOT_COLUMNS = 6, PASS_COLUMNS = PASS_HEAD + SLOT_COLUMNS * SLOTS;
const int RESULT_COLUMNS = 4;
const int FETCHED = 4; // numbers that a thread waits for at once

// Of `share` batches, spread evenly over all of them with the last one among them: those so far.
DEVICE int due_before(int batch, int share, int batches) {
  return int(whole(batch) * share / batches);
}
DEVICE bool is_due(int batch, int share, int batches) {
  if (share == batches) return true;
  return due_before(batch + 1, share, batches) > due_before(batch, share, batches);
}

struct Slot {
  int which, theta, gate; // program of its seed and the places of its parameters; -1: none
  int work;               // where its values are, of those of all seeds
  bool open, learns;      // may gradient flow on to the host; does the seed learn?
  real value, gradient;   // factors of its output, and of the gradient that it receives
};

struct Block { // what a block has in memory
  Cells theta, grads, scratch;
  Values base_losses, losses, right, labels, values, work;
  int n; // samples of this chunk
};

DEVICE Values value_of(const Block &b, int k) { return b.values + CHUNK * value_at(k); }
DEVICE Values gradient_of(const Block &b, int k) { return b.values + CHUNK * gradient_at(k); }

DEVICE Slot read_slot(const int *pass, const real *factors, int k) {
  const int *own = pass + PASS_HEAD + SLOT_COLUMNS * k;
  return Slot{READ(own[0]),      READ(own[1]),      READ(own[2]),         READ(own[3]),
              READ(own[4]) != 0, READ(own[5]) != 0, READ(factors[2 * k]), READ(factors[2 * k + 1])};
}

// --- a slot ---------------------------------------------------------------------------------------

DEVICE Values work_of(const Block &b, const Slot &s) { return b.work + CHUNK * s.work; }
DEVICE Values gated_output(const Block &b, const Slot &s, int k) {
  return work_of(b, s) + CHUNK * (gate_at(k) + 2 * slot_length(k));
}

// What the next segment reads, once the seed has been computed.
DEVICE Values slot_result(const Block &b, const Slot &s, int k) {
  if (s.which < 0 || s.value == 0) return value_of(b, k);
  return s.gate >= 0 ? gated_output(b, s, k) : work_of(b, s) + CHUNK * seed_output(s.which);
}

DEVICE Values slot_forward(const Block &b, const Slot &s, int k) {
  Values h = value_of(b, k), result = slot_result(b, s, k), work = work_of(b, s);
  if (s.which < 0) return h;
  const int C = slot_channels(k), L = slot_length(k);
  seed_forward(s.which, b.theta + s.theta, h, work);
  if (s.gate >= 0) {
    Cells w = b.theta + s.gate;
    gate_forward(C, L, w, w + C, h, work + CHUNK * seed_output(s.which), work + CHUNK * gate_at(k),
                 gated_output(b, s, k));
  }
  if (result != h) {
    EACH(i, CHUNK * C * L) result[i] = h[i] + s.value * result[i];
    SYNC();
  }
  return result;
}

// The gradient of what leaves the slot becomes that of what enters it. `flows`: somebody needs that.
DEVICE void slot_backward(const Block &b, const Slot &s, int k, bool flows) {
  if (s.which < 0 || !(s.learns || flows)) return;
  const int C = slot_channels(k), L = slot_length(k);
  Values h = value_of(b, k), g = gradient_of(b, k), work = work_of(b, s);
  Values own = work + CHUNK * seed_output_gradient(s.which), gx = flows ? g : NOWHERE;
  EACH(i, CHUNK * C * L) own[i] = s.gradient * g[i];
  SYNC();
  if (s.gate >= 0) {
    Cells w = b.theta + s.gate;
    Cells gw = s.learns ? b.grads + s.gate : NOWHERE;
    Values factor = work + CHUNK * gate_at(k);
    gate_backward(C, L, w, gw, gw + C, h,
                  work + CHUNK * seed_output(s.which), factor, factor + CHUNK * L, own, gx);
  }
  seed_backward(s.which, b.theta + s.theta, s.learns ? b.grads + s.theta : NOWHERE, h, work, NOWHERE,
                gx, b.scratch);
}

// --- a pass ---------------------------------------------------------------------------------------

DEVICE void pass_forward(const Block &b, const int *pass, const real *factors) {
  const int first = READ(pass[0]); // the slot from which the pass differs from the base pass; -1: all
  if (first < 0) segment_forward(0, b.theta, b.values, value_of(b, 0));
  for (int k = first < 0 ? 0 : first; k < SLOTS; ++k) {
    Values x = slot_forward(b, read_slot(pass, factors, k), k);
    segment_forward(k + 1, b.theta, x, value_of(b, k + 1));
  }
}

// Back to `stop`, the first slot with something to learn; -1: the host learns, all of it.
DEVICE void pass_backward(const Block &b, const int *pass, const real *factors) {
  const int stop = READ(pass[1]);
  const bool keeps = READ(pass[3]) != 0;
  Cells grads = stop < 0 ? b.grads : NOWHERE;
  for (int k = SLOTS; k > 0 && k > stop; --k) {
    const Slot s = read_slot(pass, factors, k - 1);
    // The last slot's seed is still in memory; where there was no room, the others are computed again.
    Values x = k == SLOTS || keeps ? slot_result(b, s, k - 1) : slot_forward(b, s, k - 1);
    segment_backward(k, b.theta, grads, x, value_of(b, k), gradient_of(b, k), gradient_of(b, k - 1),
                     b.scratch);
    slot_backward(b, s, k - 1, s.open && stop < k - 1);
  }
  if (grads)
    segment_backward(0, b.theta, grads, b.values, value_of(b, 0), gradient_of(b, 0), NOWHERE,
                     b.scratch);
}

// Cross-entropy of each sample, whether its largest logit is right, and the gradient of the logits.
DEVICE void score_samples(const Block &b, bool back, real share) {
  Values logits = value_of(b, SLOTS), g = gradient_of(b, SLOTS);
  const many none = many{}, past = spread(real(b.n));
  FOR(i, CHUNK) {
    many own[CLASSES], sum = none;
    UNROLL
    for (int c = 0; c < CLASSES; ++c) own[c] = logits[c * CHUNK + i];
    const many label = b.labels[i];
    many most = own[0], best = none, chosen = own[0];
    UNROLL
    for (int c = 1; c < CLASSES; ++c) {
      const many number = spread(real(c));
      best = own[c] > most ? number : best;
      most = own[c] > most ? own[c] : most;
      chosen = label == number ? own[c] : chosen;
    }
    UNROLL
    for (int c = 0; c < CLASSES; ++c) sum += exp(own[c] - most);
    const many whole_sum = most + log(sum), one = spread(1);
    b.losses[i] = whole_sum - chosen;
    b.right[i] = best == label ? one : none;
    if (!back) continue;
    const auto there = samples_at(i) < past;
    UNROLL
    for (int c = 0; c < CLASSES; ++c) {
      const many wanted = label == spread(real(c)) ? one : none;
      g[c * CHUNK + i] = there ? (exp(own[c] - whole_sum) - wanted) * share : none;
    }
  }
  SYNC();
}

// Sums over samples: loss, right ones, gain over the base pass, its square.
DEVICE void note(const Block &b, bool base, double *results) {
  if (base) {
    FOR(i, CHUNK) b.base_losses[i] = b.losses[i];
    SYNC();
  }
  FOR_WARPS(j, RESULT_COLUMNS) {
    double sum = 0;
    for (int i = LANE; i < b.n; i += LANES) {
      const double loss = sample(b.losses, i), gain = double(sample(b.base_losses, i)) - loss;
      sum += j == 0 ? loss : j == 1 ? double(sample(b.right, i)) : j == 2 ? gain : gain * gain;
    }
    sum = lanes_sum(sum);
    if (LANE == 0) ADD_ALONE(results[j], sum);
  }
}

// --- the optimiser --------------------------------------------------------------------------------

// Numbers of a module's own row.
DEVICE bool is_active(const whole *module) { return READ(*at<unsigned char>(READ(module[ACTIVE]))); }

// What moves the numbers of one module.
struct Learner {
  real *square, *first, *second;
  const real *scale;         // of each number's rate; null: 1
  const unsigned char *live; // of each number; null: all
  real rate, decay, lack1, lack2;
  bool active;
};

struct Rule { // of all of them
  real beta1, beta2, rest1, rest2, epsilon;
};

DEVICE Learner learner_of(const whole *own, Cells lacks) {
  return Learner{at<real>(READ(own[SQUARES])), at<real>(READ(own[MOMENT0])), at<real>(READ(own[MOMENT1])),
                 at<real>(READ(own[SCALE])), at<unsigned char>(READ(own[LIVE])),
                 READ(*at<real>(READ(own[RATE]))), READ(*at<real>(READ(own[DECAY]))), lacks[0], lacks[1],
                 is_active(own)};
}

// The i-th number of a module learns from its gradient, which is then used up. What is the same for all
// of them is said apart, so that it may be known to the compiler.
DEVICE void learn(const Rule &rule, const Learner &own, int i, real &theta, real &grad, bool adam,
                  bool scaled, bool partly) {
  const real squared = own.square[i], one = own.first[i], two = own.second[i], before = theta;
  const real g = partly && !READ(own.live[i]) ? real(0) : grad;
  const real stride = scaled ? own.rate * READ(own.scale[i]) : own.rate;
  real moved;
  if (adam) {
    const real mean = one + rule.rest1 * (g - one), spread = two * rule.beta2 + rule.rest2 * g * g;
    const real deviation = sqrt(spread) / sqrt(own.lack2) + rule.epsilon;
    moved = before * (1 - stride * own.decay) - mean * (stride / own.lack1) / deviation;
    own.first[i] = mean;
    own.second[i] = spread;
  } else {
    own.first[i] = one * rule.beta1 + (g + before * own.decay);
    moved = before - (one * rule.beta1 + (g + before * own.decay)) * stride;
  }
  own.square[i] = squared + g * g;
  theta = own.active ? moved : before;
  grad = 0;
}

#ifndef __CUDACC__
template <bool ADAM, bool SCALED>
static void learn_all(const Rule &rule, const Learner &own, int width, real *theta, real *grads) {
  if (own.live) {
#pragma GCC ivdep
    for (int i = 0; i < width; ++i) learn(rule, own, i, theta[i], grads[i], ADAM, SCALED, true);
  } else {
#pragma GCC ivdep
    for (int i = 0; i < width; ++i) learn(rule, own, i, theta[i], grads[i], ADAM, SCALED, false);
  }
}
#endif

DEVICE void update(const Block &b, const whole *modules, int count, int batch, int batches,
                   const double *settings) {
  const bool adam = READ(settings[IS_ADAM]) != 0;
  FOR(j, 2 * count) { // what the averages of both moments still lack
    const whole *own = modules + j / 2 * MODULE_COLUMNS;
    const int taken = is_active(own) ? due_before(batch + 1, int(READ(own[SHARE])), batches) : 0;
    const double steps = *at<double>(READ(own[STEPS])) + taken;
    b.scratch[j] = adam ? -expm1(real(steps * READ(settings[LOG_BETA1 + j % 2]))) : real(1);
  }
  SYNC();
  const Rule rule{real(READ(settings[BETA1])), real(READ(settings[BETA2])),
                  real(1 - READ(settings[BETA1])), real(1 - READ(settings[BETA2])),
                  real(READ(settings[EPSILON]))};
#ifdef __CUDACC__
  const whole *last = modules + (count - 1) * MODULE_COLUMNS, *own = modules;
  const int length = int(READ(last[PLACE]) + READ(last[WIDTH]));
  FOR(k, length) { // modules lie one after the other
    while (k >= READ(own[PLACE]) + READ(own[WIDTH])) own += MODULE_COLUMNS;
    if (!is_due(batch, int(READ(own[SHARE])), batches)) continue;
    const int i = k - int(READ(own[PLACE])), m = int(own - modules) / MODULE_COLUMNS;
    const Learner learner = learner_of(own, b.scratch + 2 * m);
    learn(rule, learner, i, b.theta[k], b.grads[k], adam, learner.scale, learner.live);
  }
#else
  for (int m = 0; m < count; ++m) {
    const whole *own = modules + m * MODULE_COLUMNS;
    if (!is_due(batch, int(own[SHARE]), batches)) continue;
    const Learner learner = learner_of(own, b.scratch + 2 * m);
    const auto all = !adam ? learner.scale ? learn_all<false, true> : learn_all<false, false>
                     : learner.scale ? learn_all<true, true> : learn_all<true, false>;
    all(rule, learner, int(own[WIDTH]), b.theta + own[PLACE], b.grads + own[PLACE]);
  }
#endif
  SYNC();
}

// --- a row ----------------------------------------------------------------------------------------

// A block's memory: what there is one number of, and what every sample has.
struct Memory {
  Cells numbers;
  Values cells;
};
DEVICE int numbers_of(int arena) { return 2 * arena + SCRATCH; }

DEVICE Block block_of(Memory memory, int arena) {
  Block b;
  b.theta = memory.numbers;
  b.grads = b.theta + arena;
  b.scratch = b.grads + arena;
  b.base_losses = memory.cells;
  b.losses = b.base_losses + CHUNK;
  b.right = b.losses + CHUNK;
  b.labels = b.right + CHUNK;
  b.values = b.labels + CHUNK;
  b.work = b.values + CHUNK * WORK_AT;
  return b;
}

// The samples from `start` on of one batch of the row, and zeros where there are none.
DEVICE void fetch(const Block &b, const whole *a, int row, int batch, int start) {
  const whole *order = at<whole>(READ(a[ORDER])), size = READ(a[BATCH]);
  const whole first = order ? 0 : READ(at<whole>(READ(a[FIRST]))[row]) + batch * size + start;
  if (order) order += (batch * READ(a[ROWS]) + row) * size + start;
  const real *inputs = at<real>(READ(a[INPUTS]));
  const whole *labels = at<whole>(READ(a[LABELS]));
#ifdef __CUDACC__
  const int EACH_SAMPLE = INPUT_SIZE + 1; // its label comes last
  ROLLED
  for (int begin = 0; begin < CHUNK * EACH_SAMPLE; begin += FETCHED * THREADS) {
    real got[FETCHED];
    UNROLL
    for (int turn = 0; turn < FETCHED; ++turn) {
      const int k = begin + turn * THREADS + int(threadIdx.x), i = k / EACH_SAMPLE, e = k % EACH_SAMPLE;
      got[turn] = 0;
      if (i >= b.n) continue;
      const whole sample = order ? READ(order[i]) : first + i;
      got[turn] = e < INPUT_SIZE ? READ(inputs[sample * INPUT_SIZE + e]) : real(READ(labels[sample]));
    }
    UNROLL
    for (int turn = 0; turn < FETCHED; ++turn) {
      const int k = begin + turn * THREADS + int(threadIdx.x), i = k / EACH_SAMPLE, e = k % EACH_SAMPLE;
      if (i < CHUNK) (e < INPUT_SIZE ? b.values + e * CHUNK : b.labels)[i] = got[turn];
    }
  }
#else
  for (int i = 0; i < CHUNK * TOGETHER; ++i) {
    const whole which = i >= b.n ? 0 : order ? order[i] : first + i;
    for (int e = 0; e < INPUT_SIZE; ++e)
      sample(b.values + e * CHUNK, i) = i < b.n ? inputs[which * INPUT_SIZE + e] : real(0);
    sample(b.labels, i) = i < b.n ? real(labels[which]) : real(0);
  }
#endif
  SYNC();
}

DEVICE void load_parameters(const Block &b, const whole *modules, int count) {
  for (int m = 0; m < count; ++m) {
    const whole *own = modules + m * MODULE_COLUMNS;
    const int place = int(READ(own[PLACE]));
    FOR(i, int(READ(own[WIDTH]))) {
      b.theta[place + i] = at<real>(READ(own[THETA]))[i];
      b.grads[place + i] = 0;
    }
  }
  SYNC();
}

DEVICE void run_row(const whole *a, int row, Memory memory) {
  Block b = block_of(memory, int(READ(a[ARENA])));
  const int *head = at<int>(READ(a[HEADS])) + row * HEAD_COLUMNS;
  const whole *modules = at<whole>(READ(a[MODULES])) + READ(head[FIRST_MODULE]) * MODULE_COLUMNS;
  const int count = READ(head[MODULE_COUNT]), batches = int(READ(a[BATCHES]));
  const int from = READ(head[FIRST_PASS]), to = from + READ(head[PASS_COUNT]);
  const double *settings = at<double>(READ(a[SETTINGS])); // null: nothing learns
  load_parameters(b, modules, count);
  for (int batch = 0; batch < batches; ++batch) {
    const int size = int(smaller(READ(a[BATCH]), READ(a[SAMPLES]) - batch * READ(a[BATCH])));
    for (int start = 0; start < size; start += CHUNK_SAMPLES) {
      b.n = smaller(CHUNK_SAMPLES, size - start);
      fetch(b, a, row, batch, start);
      for (int turn = from; turn < to; ++turn) {
        const int *pass = at<int>(READ(a[PASSES])) + turn * PASS_COLUMNS;
        const real *factors = at<real>(READ(a[FACTORS])) + turn * 2 * SLOTS;
        if (!is_due(batch, READ(pass[2]), batches)) continue;
        const bool back = settings && READ(pass[1]) < SLOTS;
        pass_forward(b, pass, factors);
        score_samples(b, back, real(1) / real(size));
        note(b, turn == from, at<double>(READ(a[RESULTS])) + READ(pass[4]) * RESULT_COLUMNS);
        if (back) pass_backward(b, pass, factors);
      }
    }
    if (settings) update(b, modules, count, batch, batches, settings);
  }
  if (!settings) return;
  for (int m = 0; m < count; ++m) {
    const whole *own = modules + m * MODULE_COLUMNS;
    const int place = int(READ(own[PLACE]));
    FOR(i, int(READ(own[WIDTH]))) at<real>(READ(own[THETA]))[i] = b.theta[place + i];
    FOR(i, 1) {
      if (is_active(own)) *at<double>(READ(own[STEPS])) += READ(own[SHARE]);
    }
  }
  FOR_WARPS(m, count) { // what its gradients' squares add up to
    const whole *own = modules + m * MODULE_COLUMNS;
    double sum = 0;
    for (int i = LANE; i < READ(own[WIDTH]); i += LANES) sum += at<real>(READ(own[SQUARES]))[i];
    sum = lanes_sum(sum);
    if (LANE == 0) at<double>(READ(a[NORMS]))[READ(own[NORM])] = sum;
  }
}
