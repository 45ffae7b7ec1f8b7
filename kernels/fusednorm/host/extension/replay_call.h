// Execution of a recorded call: allocates its results and its own memory, and launches its kernels.

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

// Allocates a result that has its own tensor.
Tensor allocate_output(const OutputSpec& output, const Tensor& x) {
  const auto options = x.options().dtype(output.dtype).requires_grad(false);
  switch (output.shape_source) {
    case ShapeSource::kAsX:
      return at::empty(x.sizes(), options);
    case ShapeSource::kAsRows:
      return at::empty(x.sizes().slice(0, x.dim() - 1), options);
    default:
      if (output.strides.empty()) return at::empty(output.sizes, options);
      return at::empty_strided(output.sizes, output.strides, options);
  }
}

// Appends the addresses of the stream's workspaces; false if there are none yet.
bool append_workspaces(CallReplay& replay, void* stream, Slots& slots) {
  std::lock_guard lock(replay.mutex);
  for (const auto& [other_stream, tensors] : replay.stream_workspaces) {
    if (other_stream != stream) continue;
    for (const Tensor& tensor : tensors) slots.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
    return true;
  }
  return false;
}

// Has Python create the stream's workspaces, and keeps them.
void create_workspaces(CallReplay& replay, void* stream) {
  pybind11::gil_scoped_acquire lock;
  std::vector<Tensor> made;
  for (const WorkspaceSpec& workspace : replay.workspaces) {
    PyObject* tensor =
        PyObject_CallFunction(g_get_workspace, "iKLs", replay.device, reinterpret_cast<unsigned long long>(stream),
                              static_cast<long long>(workspace.words), workspace.purpose.c_str());
    if (tensor == nullptr) throw python_error();
    made.push_back(THPVariable_Unpack(tensor));
    Py_DECREF(tensor);
  }
  std::lock_guard guard(replay.mutex);
  replay.stream_workspaces.emplace_back(stream, std::move(made));
}

// Executes a recorded call; results are in the order of their fields.  False if Python has to make the call.
bool replay_call(CallReplay& replay, const Inputs& inputs, std::array<Tensor, kMaxResults>& results) {
  c10::OptionalDeviceGuard guard;
  if (!is_current_device(replay.device))
    guard.reset_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(replay.device)));
  at::AutoDispatchBelowADInplaceOrView below;  // An allocation is never differentiated.
  const Tensor& x = inputs[0];
  Slots slots;
  uint64_t address_bits = 0;
  for (const Tensor& tensor : inputs) {
    if (!tensor.defined()) continue;
    const auto address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    if (address == 0) return false;
    address_bits |= address;
    slots.push_back(address);
  }
  if (address_bits % 16) return false;
  void* stream = get_current_stream(replay.device);
  if (!replay.workspaces.empty()) {
    if (is_capturing(replay.device, stream)) return false;
    Slots ignored;
    if (!append_workspaces(replay, stream, ignored)) create_workspaces(replay, stream);
  }
  for (size_t place = 0; place < replay.outputs.size(); ++place) {
    const OutputSpec& output = replay.outputs[place];
    if (output.is_absent) continue;
    if (output.shared_with >= 0) {
      results[place] = results[output.shared_with];
      continue;
    }
    results[place] = allocate_output(output, x);
    const auto address = reinterpret_cast<uint64_t>(results[place].data_ptr());
    if (address % 16) return false;
    slots.push_back(address);
  }
  Tensor scratch;  // Kept until everything is launched: the memory's next user then runs after these launches.
  if (replay.scratch_words != 0) {
    scratch = at::empty({replay.scratch_words}, x.options().dtype(at::kFloat).requires_grad(false));
    const auto address = reinterpret_cast<uint64_t>(scratch.data_ptr());
    for (int64_t offset : replay.scratch_offsets) slots.push_back(address + offset);
  }
  if (!replay.workspaces.empty()) append_workspaces(replay, stream, slots);
  if (!replay.program_count_rules.empty()) {
    const int64_t rows = x.numel() / x.size(-1);
    slots.push_back(rows);
    for (const auto& [rows_per_program, max_programs] : replay.program_count_rules)
      slots.push_back(std::min((rows + rows_per_program - 1) / rows_per_program, max_programs));
  }
  for (const PreparedLaunch& launch : replay.launches) launch_kernel(launch, replay.device, stream, slots);
  return true;
}

}  // namespace
