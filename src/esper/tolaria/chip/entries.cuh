// What is called from outside: tables are written by one thread a row, then a block computes each row.
// One entry trains, scores and describes what flows, so that its layers are compiled once.
#pragma once
#include "describe.cuh"
#include "flow.cuh"

DEVICE void compute_row(const whole *a, int place, Memory memory) {
  const int row = int(READ(at<whole>(READ(a[QUEUE]))[place]));
  if (READ(a[IS_FLOW]))
    flow_row(a, row, memory);
  else
    run_row(a, row, memory);
}

#ifdef __CUDACC__
extern "C" __global__ void describe_rows(const whole *arguments) {
  const int row = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < READ(arguments[ROWS])) describe_row(arguments, row);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) compute_rows(const whole *arguments) {
  const Cells start{0};
  const int numbers = numbers_of(int(READ(arguments[ARENA])));
  compute_row(arguments, int(blockIdx.x), Memory{start, start + numbers});
}
#else
extern "C" void describe_rows(const whole *arguments) {
  for (int row = 0; row < arguments[ROWS]; ++row) describe_row(arguments, row);
}
extern "C" void compute_rows(const whole *arguments) {
  std::vector<real> numbers(numbers_of(int(arguments[ARENA])));
  std::vector<many> cells(CHUNK * (4 + PER_SAMPLE));
  for (int i = 0; i < arguments[ROWS]; ++i)
    compute_row(arguments, i, Memory{numbers.data(), cells.data()});
}

// One seed alone on CHUNK_SAMPLES samples, for tests: output y of x, and with gy the gradients that are
// added to. Element e of sample i is at e * CHUNK_SAMPLES + i.
static void move_samples(Values cells, real *plain, int elements, bool in) {
  for (int k = 0; k < elements * CHUNK_SAMPLES; ++k) {
    real &cell = sample(cells + k / CHUNK_SAMPLES * CHUNK, k % CHUNK_SAMPLES);
    (in ? cell : plain[k]) = in ? plain[k] : cell;
  }
}
extern "C" void run_seed(int which, int given, real *theta, real *x, real *y, real *gy, real *gx,
                         real *gtheta) {
  std::vector<many> work(CHUNK * PER_SAMPLE), seen(CHUNK * given), slope(CHUNK * given);
  std::vector<real> scratch(SCRATCH);
  move_samples(seen.data(), x, given, true);
  move_samples(slope.data(), gx, given, true);
  seed_forward(which, theta, seen.data(), work.data());
  move_samples(work.data() + CHUNK * seed_output(which), y, seed_size(which), false);
  for (int i = 0; i < CHUNK * seed_size(which); ++i)
    work[CHUNK * seed_output_gradient(which) + i] = many{};
  move_samples(work.data() + CHUNK * seed_output_gradient(which), gy, seed_size(which), true);
  seed_backward(which, theta, gtheta, seen.data(), work.data(), nullptr, slope.data(), scratch.data());
  move_samples(slope.data(), gx, given, false);
}
#endif
