// The stored data of a recorded call, with which its kernels are launched again.

#pragma once

#include <Python.h>

#include <array>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <cuda.h>

namespace {

using at::Tensor;

constexpr size_t kMaxResults = 7;

using Inputs = std::vector<Tensor>;  // Undefined for an absent input.

// The addresses and numbers of one call. Not a thread's: where a call runs Python code, that may make another call.
using Slots = c10::SmallVector<uint64_t, 48>;

// The source of a kernel's parameter: one of the call's `Slots`, or a constant.
struct KernelParameter {
  bool is_constant;
  uint32_t slot;
  uint64_t constant_bits;
};

// A launch of a kernel, as the driver gets it.
struct PreparedLaunch {
  CUfunction function;
  std::array<unsigned, 3> grid;
  int grid_slot;  // The slot with the first size of the grid; -1 if that size is constant.
  unsigned thread_count, shared_bytes;
  bool may_start_early;  // Before the end of the launch before it.
  bool is_cooperative;
  std::vector<KernelParameter> parameters;
};

// The source of a result's shape: its `OutputSpec`, x, or x without its last axis.
enum class ShapeSource { kFixed, kAsX, kAsRows };

// How a result is allocated.
struct OutputSpec {
  bool is_absent;
  int shared_with;  // The earlier result whose tensor this one shares; -1 if it has its own.
  ShapeSource shape_source;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

// Memory that a stream's launches with the same purpose share.
struct WorkspaceSpec {
  int64_t words;  // Of eight bytes.
  std::string purpose;
};

// All that a recorded call allocates and launches.
struct CallReplay {
  int device;
  int64_t scratch_words;  // float32 elements of the launches' own memory.
  std::vector<int64_t> scratch_offsets;  // In bytes, of the parts of that memory.
  std::vector<WorkspaceSpec> workspaces;
  // By each, a number of programs is the number of rows divided by the first value, and at most the second.
  std::vector<std::pair<int64_t, int64_t>> program_count_rules;
  std::vector<PreparedLaunch> launches;
  std::vector<OutputSpec> outputs;
  std::mutex mutex;  // Of what follows.
  // Workspaces of the streams that have launched this call.
  std::vector<std::pair<void*, std::vector<Tensor>>> stream_workspaces;
};

// The role of an input, as in `arguments.inputs`; the others are parameters.
enum class ShapeRole : uint8_t { kLikeX, kPerRow, kParameter };

// The inputs of a pass.
struct PassInputs {
  std::vector<ShapeRole> roles;  // x first; empty if launches never depend only on the number of rows.
};

// A forward pass with its derivative, by the numbers of the passes and of their options.
struct DifferentiableCall {
  int forward_pass, backward_pass;
  uint32_t options_with_statistics, options_without_statistics;  // Of the forward pass.
  uint32_t options_with_parameter_gradients, options_without_parameter_gradients;  // Of the backward pass.
  PyObject* settings;  // An argument of the backward pass in Python.
};

}  // namespace
