// Execution of a known call: allocates its results and its own memory, and launches its kernels.

#pragma once

#include <Python.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "driver.h"
#include "replay.h"
#include "state.h"

namespace {

Tensor allocated(const Output& output, const Tensor& x) {
  const auto options = x.options().dtype(output.dtype).requires_grad(false);
  switch (output.shape) {
    case Shape::kX:
      return at::empty(x.sizes(), options);
    case Shape::kRows:
      return at::empty(x.sizes().slice(0, x.dim() - 1), options);
    default:
      if (output.strides.empty()) return at::empty(output.sizes, options);
      return at::empty_strided(output.sizes, output.strides, options);
  }
}

// Collects the stream's workspaces; false if there are none yet.
bool workspaces_of(Replay& replay, void* stream, Slots& slots) {
  std::lock_guard lock(replay.mutex);
  for (const auto& [of, tensors] : replay.of_streams) {
    if (of != stream) continue;
    for (const Tensor& tensor : tensors) slots.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
    return true;
  }
  return false;
}

void make_workspaces(Replay& replay, void* stream) {
  pybind11::gil_scoped_acquire lock;
  std::vector<Tensor> made;
  for (const Workspace& workspace : replay.workspaces) {
    PyObject* tensor =
        PyObject_CallFunction(g_workspace, "iKLs", replay.device, reinterpret_cast<unsigned long long>(stream),
                              static_cast<long long>(workspace.words), workspace.purpose.c_str());
    if (tensor == nullptr) throw python_error();
    made.push_back(THPVariable_Unpack(tensor));
    Py_DECREF(tensor);
  }
  std::lock_guard guard(replay.mutex);
  replay.of_streams.emplace_back(stream, std::move(made));
}

// Makes a known call; results are in the order of their fields.  False if Python has to make it.
bool make(Replay& replay, const Inputs& inputs, std::array<Tensor, kMostResults>& results) {
  c10::OptionalDeviceGuard guard;
  if (!is_current(replay.device))
    guard.reset_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(replay.device)));
  at::AutoDispatchBelowADInplaceOrView below;  // An allocation is never differentiated.
  const Tensor& x = inputs[0];
  Slots slots;
  uint64_t bits = 0;
  for (const Tensor& tensor : inputs) {
    if (!tensor.defined()) continue;
    const auto address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    if (address == 0) return false;
    bits |= address;
    slots.push_back(address);
  }
  if (bits % 16) return false;
  void* stream = current_stream(replay.device);
  if (!replay.workspaces.empty()) {
    if (is_captured(replay.device, stream)) return false;
    Slots found;
    if (!workspaces_of(replay, stream, found)) make_workspaces(replay, stream);
  }
  for (size_t place = 0; place < replay.outputs.size(); ++place) {
    const Output& output = replay.outputs[place];
    if (output.absent) continue;
    if (output.same >= 0) {
      results[place] = results[output.same];
      continue;
    }
    results[place] = allocated(output, x);
    const auto address = reinterpret_cast<uint64_t>(results[place].data_ptr());
    if (address % 16) return false;
    slots.push_back(address);
  }
  Tensor own;  // Kept until everything is launched: the memory's next user then runs after these launches.
  if (replay.words != 0) {
    own = at::empty({replay.words}, x.options().dtype(at::kFloat).requires_grad(false));
    const auto start = reinterpret_cast<uint64_t>(own.data_ptr());
    for (int64_t offset : replay.offsets) slots.push_back(start + offset);
  }
  if (!replay.workspaces.empty()) workspaces_of(replay, stream, slots);
  if (!replay.rules.empty()) {
    const int64_t rows = x.numel() / x.size(-1);
    slots.push_back(rows);
    for (const auto& [tile, most] : replay.rules) slots.push_back(std::min((rows + tile - 1) / tile, most));
  }
  for (const Start& start : replay.starts) launch(start, replay.device, stream, slots);
  return true;
}

}  // namespace
