// Records a call by its description in Python, by which it can be replayed.

#pragma once

#include <Python.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include "call_keys.h"
#include "replay.h"
#include "state.h"
#include "tensors.h"

namespace {

// The functions to parse throw std::invalid_argument if an object is not what they expect.
std::vector<int64_t> parse_integers(PyObject* sequence) {
  std::vector<int64_t> values;
  PyObject* fast = PySequence_Fast(sequence, "a sequence of integers");
  if (fast == nullptr) throw std::invalid_argument("not a sequence");
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i)
    values.push_back(static_cast<int64_t>(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i))));
  Py_DECREF(fast);
  if (PyErr_Occurred()) throw std::invalid_argument("not an integer");
  return values;
}

OutputSpec parse_output(PyObject* described) {
  OutputSpec output{true, -1, ShapeSource::kFixed, at::kFloat, {}, {}};
  if (described == Py_None) return output;
  output.is_absent = false;
  int shape = 0;
  PyObject *dtype = nullptr, *sizes = nullptr, *strides = nullptr;
  if (!PyArg_ParseTuple(described, "iiOOO", &output.shared_with, &shape, &dtype, &sizes, &strides))
    throw std::invalid_argument("not an output");
  output.shape_source = static_cast<ShapeSource>(shape);
  output.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  output.sizes = parse_integers(sizes);
  output.strides = parse_integers(strides);
  return output;
}

PreparedLaunch parse_launch(PyObject* described) {
  PreparedLaunch launch{};
  unsigned long long function = 0;
  int may_start_early = 0, is_cooperative = 0;
  PyObject* parameters = nullptr;
  if (!PyArg_ParseTuple(described, "K(III)iIIppO", &function, &launch.grid[0], &launch.grid[1], &launch.grid[2],
                        &launch.grid_slot, &launch.thread_count, &launch.shared_bytes, &may_start_early,
                        &is_cooperative, &parameters))
    throw std::invalid_argument("not a launch");
  launch.function = reinterpret_cast<CUfunction>(function);
  launch.may_start_early = may_start_early != 0;
  launch.is_cooperative = is_cooperative != 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parameters); ++i) {
    int is_constant = 0;
    unsigned long long value = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "pK", &is_constant, &value))
      throw std::invalid_argument("not a parameter");
    launch.parameters.push_back({is_constant != 0, is_constant ? 0 : static_cast<uint32_t>(value), value});
  }
  return launch;
}

// record_replay(pass, policy, options, inputs, any_rows, device, scratch_words, scratch_offsets, workspaces,
//               program_count_rules, launches, outputs)
PyObject* record_replay(PyObject*, PyObject* arguments) {
  int pass = 0, any_rows = 0, device = 0;
  unsigned policy = 0;
  long long scratch_words = 0;
  PyObject *options, *given_inputs, *scratch_offsets, *workspaces, *program_count_rules, *launches, *outputs;
  if (!PyArg_ParseTuple(arguments, "iIOO!piLOOOOO", &pass, &policy, &options, &PyTuple_Type, &given_inputs, &any_rows,
                        &device, &scratch_words, &scratch_offsets, &workspaces, &program_count_rules, &launches,
                        &outputs))
    return nullptr;
  HANDLE_TH_ERRORS
  uint32_t options_number = 0;
  if (!find_or_assign_number(g_option_numbers, options, options_number)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  Inputs inputs;
  if (!unpack_tensors(&PyTuple_GET_ITEM(given_inputs, 0), PyTuple_GET_SIZE(given_inputs), inputs)) Py_RETURN_NONE;
  for (const Tensor& tensor : inputs)
    if (tensor.defined() && !is_plain_tensor(tensor)) Py_RETURN_NONE;
  auto replay = std::make_shared<CallReplay>();
  replay->device = device;
  replay->scratch_words = scratch_words;
  replay->scratch_offsets = parse_integers(scratch_offsets);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(workspaces); ++i) {
    long long words = 0;
    const char* purpose = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(workspaces, i), "Ls", &words, &purpose)) return nullptr;
    replay->workspaces.push_back({words, purpose});
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(program_count_rules); ++i) {
    const auto rule = parse_integers(PyTuple_GET_ITEM(program_count_rules, i));
    replay->program_count_rules.emplace_back(rule.at(0), rule.at(1));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); ++i)
    replay->launches.push_back(parse_launch(PyTuple_GET_ITEM(launches, i)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
    replay->outputs.push_back(parse_output(PyTuple_GET_ITEM(outputs, i)));
  std::string key;
  const bool may_have_any_rows = write_key_for_any_rows(key, pass, policy, options_number, inputs);
  if (may_have_any_rows) store_replay(key, any_rows ? replay : nullptr);
  if (!may_have_any_rows || !any_rows) {
    write_key_for_shapes(key, pass, policy, options_number, inputs);
    store_replay(key, replay);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
