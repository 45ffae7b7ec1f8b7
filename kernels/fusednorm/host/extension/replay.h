// The stored data of a known call, with which its kernels are launched again.

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

constexpr size_t kMostResults = 6;

using Inputs = std::vector<Tensor>;  // Undefined for an absent input.

// The addresses and numbers of one call. Not a thread's: where a call runs Python code, that may make another call.
using Slots = c10::SmallVector<uint64_t, 48>;

// The source of a kernel's parameter: `kSlot` of the addresses and numbers of a call, or a constant.
struct Parameter {
  bool constant;
  uint32_t slot;
  uint64_t bits;
};

struct Start {
  CUfunction function;
  std::array<unsigned, 3> grid;
  int programs;  // The slot with the first size of the grid; -1 if that size is constant.
  unsigned threads, shared;
  bool early, cooperative;
  std::vector<Parameter> parameters;
};

enum class Shape { kFixed, kX, kRows };

struct Output {
  bool absent;
  int same;  // The earlier result whose tensor this one shares; -1 if it has its own.
  Shape shape;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

struct Workspace {
  int64_t words;
  std::string purpose;
};

struct Replay {
  int device;
  int64_t words;  // float32 elements of the launches' own memory.
  std::vector<int64_t> offsets;
  std::vector<Workspace> workspaces;
  std::vector<std::pair<int64_t, int64_t>> rules;
  std::vector<Start> starts;
  std::vector<Output> outputs;
  std::mutex mutex;
  // Workspaces of streams that have launched this call.
  std::vector<std::pair<void*, std::vector<Tensor>>> of_streams;
};

// The role of an input, as in `arguments.inputs`; the others are parameters.
enum class Role : uint8_t { kLikeX, kOfRows, kParameter };

struct Pass {
  std::vector<Role> roles;  // x first; empty if launches never depend only on the number of rows.
};

struct Differentiable {
  int forward, backward;        // Passes.
  uint32_t saving, plain;        // Options: forward with and without statistics,
  uint32_t back, frozen;         // backward with and without gradients of parameters.
  PyObject* settings;  // Arguments of the backward pass in Python.
};

}  // namespace
