// What flows past each slot of a row, as sums over samples of what `kasmina/flow_statistics.py` means.
#pragma once
#include "row.cuh"

// Of a sample's values: its power's logarithm and that one's square, its power, fourth powers, squared
// steps between neighbours, the variance over places; and the share that is silent.
enum FlowSum { LOG_POWER, LOG_POWER2, POWER, FOURTH, STEPS2, VARIANCE, SILENT, FLOW_SUMS };
const double TINY = 1e-12, SILENCE = 1e-6;

// One number of the i-th sample's values in `h`, C lines of L; `silence`: a square below it is none.
DEVICE double flow_of(int which, Values h, int i, int C, int L, double silence) {
  double power = 0, sum = 0;
  ROLLED
  for (int c = 0; c < C; ++c) {
    double own = 0, mean = 0, before = 0;
    ROLLED
    for (int l = 0; l < L; ++l) {
      const double value = double(sample(h + (c * L + l) * CHUNK, i)), square = value * value;
      power += square;
      mean += value;
      own += square;
      if (which == FOURTH) sum += square * square;
      if (which == SILENT) sum += square < silence;
      if (which == STEPS2 && l > 0) sum += (value - before) * (value - before);
      before = value;
    }
    if (which == VARIANCE) sum += own - mean * mean / L;
  }
  if (which == STEPS2) return L > 1 ? sum / (C * (L - 1)) : 0;
  if (which >= FOURTH) return sum / (C * L);
  power = power / (C * L) + TINY;
  const double seen = which == POWER ? power : log(power);
  return which == LOG_POWER2 ? seen * seen : seen;
}

APART void flow_row(const whole *a, int row, Memory memory) {
  Block b = block_of(memory, int(READ(a[ARENA])));
  const int *head = at<int>(READ(a[HEADS])) + row * HEAD_COLUMNS;
  const int *pass = at<int>(READ(a[PASSES])) + READ(head[FIRST_PASS]) * PASS_COLUMNS;
  const real *factors = at<real>(READ(a[FACTORS])) + READ(head[FIRST_PASS]) * 2 * SLOTS;
  const int samples = int(READ(a[SAMPLES])), batches = int(READ(a[BATCHES]));
  double *sums = at<double>(READ(a[RESULTS])) + row * SLOTS * FLOW_SUMS;
  load_parameters(b, at<whole>(READ(a[MODULES])) + READ(head[FIRST_MODULE]) * MODULE_COLUMNS,
                  READ(head[MODULE_COUNT]));
  for (int again = 0; again < 2; ++again) // what is silent is known once all power is
    for (int batch = 0; batch < batches; ++batch) {
      b.n = smaller(CHUNK_SAMPLES, samples - batch * CHUNK_SAMPLES);
      fetch(b, a, row, batch, 0);
      pass_forward(b, pass, factors);
      FOR_WARPS(j, SLOTS * FLOW_SUMS) {
        const int k = j / FLOW_SUMS, which = j % FLOW_SUMS;
        if ((which == SILENT) != (again == 1)) continue;
        const double silence = again ? SILENCE * sums[k * FLOW_SUMS + POWER] / samples : 0;
        double sum = 0;
        for (int i = LANE; i < b.n; i += LANES)
          sum += flow_of(which, value_of(b, k), i,
                         slot_channels(k) * slot_length(k) / slot_neighbours(k), slot_neighbours(k), silence);
        sum = lanes_sum(sum);
        if (LANE == 0) sums[j] += sum;
      }
      SYNC();
    }
}
