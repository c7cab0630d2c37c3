// What each row consists of and which passes it makes: the tables that `row.cuh` reads, written by one
// thread a row from the arrays of its slots as they are.
#pragma once
#include "row.cuh"

// Of a slot: its blueprint, the rows of its seed and its gate (-1: none), and its alpha's bits.
enum SlotState { STAGE, KIND, SEAT, GATE_SEAT, ALPHA, STATE_COLUMNS };
const int KEPT = MODULE_COLUMNS - THETA;      // tensors that a pool keeps by row
const int HOST_EFFORT = 10000;                // multiplications that a sample takes without seeds, about
const int SEED_EFFORT = 2500;                 // what a seed's few operations cost anyhow
const int SOME = SLOTS > 0 ? SLOTS : 1;       // places of an array with one for each slot
enum PoolPlace { HOST_POOL, GATE_POOLS, SEED_POOLS = GATE_POOLS + SLOTS,
                 SHADOW_POOLS = SEED_POOLS + SLOTS * BLUEPRINTS };

struct Row {
  const whole *a;
  int number, modules, passes, first_pass, arena, effort;
  int kind[SOME], place[SOME], gate[SOME]; // of seeds that take part; -1: none
  real alpha[SOME];
  bool isolated[SOME];
};

struct Pass {
  int first, stop, share, result;
  int shadow, place; // blueprint of the shadow at its first slot, and where its parameters are; -1: none
  real value[SOME], gradient[SOME];
  bool learns[SOME];
};

// The place of its parameters in the row's arena.
DEVICE int add_module(Row &r, int pool, whole seat, int width, int share) {
  const whole room = READ(r.a[MODULE_ROOM]), first = r.number * room;
  const whole *from = at<whole>(READ(r.a[POOLS])) + pool * 2 * KEPT;
  whole *own = at<whole>(READ(r.a[MODULES])) + (first + r.modules++) * MODULE_COLUMNS;
  own[SHARE] = share;
  own[PLACE] = r.arena;
  own[WIDTH] = width;
  // Norms lie as the pools do, seeds and shadows of a slot in one place for each blueprint or for all.
  const int other = pool - SEED_POOLS;
  own[NORM] = first + (pool >= SHADOW_POOLS ? 1 + 2 * SLOTS + pool - SHADOW_POOLS
                       : other >= 0         ? 1 + SLOTS + other / BLUEPRINTS
                                            : pool);
  for (int i = 0; i < KEPT; ++i) {
    const whole base = READ(from[i]);
    own[THETA + i] = base ? base + seat * READ(from[KEPT + i]) : 0;
  }
  r.arena += width;
  return r.arena - width;
}

DEVICE void add_pass(Row &r, const Pass &p) {
  const int number = r.first_pass + r.passes++;
  int *head = at<int>(READ(r.a[PASSES])) + number * PASS_COLUMNS, room = 0;
  real *factors = at<real>(READ(r.a[FACTORS])) + number * 2 * SLOTS;
  r.effort += HOST_EFFORT;
  for (int k = 0; k < SLOTS; ++k) {
    const bool shadow = p.shadow >= 0 && k == p.first;
    const int kind = shadow ? p.shadow : r.kind[k], gate = shadow ? -1 : r.gate[k];
    const int which = p.value[k] > 0 || p.learns[k] ? seed_program(k * BLUEPRINTS + kind) : -1;
    int *own = head + PASS_HEAD + SLOT_COLUMNS * k;
    own[0] = which;
    own[1] = shadow ? p.place : r.place[k];
    own[2] = gate;
    own[3] = room;
    own[4] = p.value[k] > 0; // what does not show sends nothing back either
    own[5] = p.learns[k];
    factors[2 * k] = p.value[k];
    factors[2 * k + 1] = p.gradient[k];
    if (which < 0) continue;
    room += gate >= 0 ? gate_room(k) : seed_room(which);
    r.effort += SEED_EFFORT + seed_width(which) * slot_length(k);
  }
  const bool keeps = room <= PER_SAMPLE - WORK_AT;
  for (int k = 0; k < SLOTS && !keeps; ++k) head[PASS_HEAD + SLOT_COLUMNS * k + 3] = 0;
  const int columns[PASS_HEAD] = {p.first, p.stop, p.share, keeps, p.result};
  for (int i = 0; i < PASS_HEAD; ++i) head[i] = columns[i];
}

// With every seed at its alpha and nothing to learn.
DEVICE Pass plain_pass(const Row &r, int first, int share, int result) {
  Pass p{first, SLOTS, share, result, -1, -1};
  for (int k = 0; k < SLOTS; ++k) {
    p.value[k] = p.gradient[k] = r.alpha[k];
    p.learns[k] = false;
  }
  return p;
}

DEVICE void add_base(Row &r, int batches, bool learning, bool straight) {
  Pass p = plain_pass(r, -1, batches, r.number);
  if (learning) p.stop = -1;
  for (int k = 0; k < SLOTS && learning; ++k) {
    if (straight && r.isolated[k]) p.value[k] = 0, p.gradient[k] = 1;
    p.learns[k] = p.gradient[k] > 0;
  }
  add_pass(r, p);
}

// The TRAINING seeds fully on; they alone learn, and the first of them is at `first`.
DEVICE void add_alone(Row &r, int first, int batches, int rows) {
  Pass p = plain_pass(r, first, batches, rows + r.number);
  p.stop = first;
  for (int k = 0; k < SLOTS; ++k) {
    if (r.isolated[k]) p.value[k] = p.gradient[k] = 1;
    p.learns[k] = r.isolated[k];
  }
  add_pass(r, p);
}

DEVICE void add_shadow(Row &r, int slot, int kind, int place, int share, int rows) {
  const int result = 2 * rows + (r.number * SLOTS + slot) * BLUEPRINTS + kind;
  Pass p = plain_pass(r, slot, share, result);
  p.stop = slot;
  p.shadow = kind;
  p.place = place;
  p.value[slot] = p.gradient[slot] = 1;
  p.learns[slot] = true;
  add_pass(r, p);
}

// Passes asked for, with some seeds off, whose first difference is at `slot`.
DEVICE void add_subsets(Row &r, int slot, int batches, int rows) {
  const whole *starts = at<whole>(READ(r.a[ASKED_STARTS])) + r.number, *asked = at<whole>(READ(r.a[ASKED]));
  for (whole q = READ(starts[0]); q < READ(starts[1]); ++q) {
    const whole off = READ(asked[q]);
    Pass p = plain_pass(r, slot, batches, int(rows + q));
    int first = SLOTS;
    for (int k = SLOTS - 1; k >= 0; --k) {
      if (!(off >> k & 1) || p.value[k] == 0) continue;
      p.value[k] = p.gradient[k] = 0;
      first = k;
    }
    if (first == slot) add_pass(r, p);
  }
}

DEVICE void describe_row(const whole *a, int number) {
  const int rows = int(READ(a[ROWS])), batches = int(READ(a[BATCHES]));
  const bool learning = READ(a[SETTINGS]) != 0, straight = READ(a[IS_STRAIGHT]) != 0;
  const whole *starts = at<whole>(READ(a[ASKED_STARTS])), *shadows = at<whole>(READ(a[SHADOWS]));
  const int share = shadows ? int(READ(at<whole>(READ(a[SHARES]))[number])) : 0;
  const whole *states = at<whole>(READ(a[STATES])) + number * SLOTS * STATE_COLUMNS;
  Row r{a, number};
  r.first_pass = int(number * READ(a[PASS_ROOM]) + (starts ? READ(starts[number]) : 0));
  add_module(r, HOST_POOL, number, HOST_WIDTH, batches);
  int alone = SLOTS; // the first seed that is TRAINING
  for (int k = SLOTS - 1; k >= 0; --k) {
    const whole *own = states + k * STATE_COLUMNS, bits = READ(own[ALPHA]);
    r.kind[k] = int(READ(own[KIND]));
    r.alpha[k] = real(*(const double *)&bits);
    r.isolated[k] = learning && READ(own[STAGE]) == READ(a[TRAINING_STAGE]);
    r.place[k] = r.gate[k] = -1;
    if (r.isolated[k]) alone = k;
  }
  for (int k = 0; k < SLOTS; ++k) {
    const int kind = k * BLUEPRINTS + r.kind[k];
    if (r.alpha[k] > 0 || r.isolated[k])
      r.place[k] = add_module(r, SEED_POOLS + kind, READ(states[k * STATE_COLUMNS + SEAT]),
                              seed_width(seed_program(kind)), batches);
  }
  for (int k = 0; k < SLOTS; ++k) {
    const whole seat = READ(states[k * STATE_COLUMNS + GATE_SEAT]);
    if (r.place[k] >= 0 && seat >= 0)
      r.gate[k] = add_module(r, GATE_POOLS + k, seat, slot_channels(k) + 1, batches);
  }
  add_base(r, batches, learning, straight);
  for (int k = SLOTS - 1; k >= 0; --k) { // by falling first slot
    if (k == alone && !straight) add_alone(r, k, batches, rows);
    for (int kind = 0; kind < BLUEPRINTS && share > 0; ++kind) {
      const int there = k * BLUEPRINTS + kind;
      const whole seat = READ(shadows[number * SLOTS * BLUEPRINTS + there]);
      if (seat < 0) continue;
      const int width = seed_width(seed_program(there));
      add_shadow(r, k, kind, add_module(r, SHADOW_POOLS + there, seat, width, share), share, rows);
    }
    if (starts) add_subsets(r, k, batches, rows);
  }
  int *head = at<int>(READ(a[HEADS])) + number * HEAD_COLUMNS;
  head[FIRST_MODULE] = int(number * READ(a[MODULE_ROOM]));
  head[MODULE_COUNT] = r.modules;
  head[FIRST_PASS] = r.first_pass;
  head[PASS_COUNT] = r.passes;
  at<whole>(READ(a[EFFORTS]))[number] = r.effort;
}
