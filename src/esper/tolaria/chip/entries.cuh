// What is called from outside: tables are written by one thread a row, then a block computes each row.
// One entry trains, scores and describes what flows, so that its layers are compiled once.
#pragma once
#include "describe.cuh"
#include "flow.cuh"

DEVICE void compute_row(const whole *a, int place, Cells memory) {
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
  compute_row(arguments, int(blockIdx.x), Cells{0});
}
#else
extern "C" void describe_rows(const whole *arguments) {
  for (int row = 0; row < arguments[ROWS]; ++row) describe_row(arguments, row);
}
extern "C" void compute_rows(const whole *arguments) {
  std::vector<real> memory(2 * arguments[ARENA] + SCRATCH + CHUNK * (4 + PER_SAMPLE));
  for (int i = 0; i < arguments[ROWS]; ++i) compute_row(arguments, i, memory.data());
}

// One seed alone on CHUNK samples, for tests: output y of x, and with gy the gradients that are added to.
extern "C" void run_seed(int which, real *theta, real *x, real *y, const real *gy, real *gx,
                         real *gtheta) {
  std::vector<real> work(CHUNK * PER_SAMPLE), scratch(SCRATCH);
  const int size = CHUNK * seed_size(which);
  seed_forward(which, theta, x, work.data());
  for (int i = 0; i < size; ++i) y[i] = work[CHUNK * seed_output(which) + i];
  for (int i = 0; i < size; ++i) work[CHUNK * seed_output_gradient(which) + i] = gy[i];
  seed_backward(which, theta, gtheta, x, work.data(), nullptr, gx, scratch.data());
}
#endif
