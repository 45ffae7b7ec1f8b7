// Learns a call from its description by `launch.native`.

#pragma once

#include <Python.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include "kinds.h"
#include "replay.h"
#include "state.h"
#include "tensors.h"

namespace {

std::vector<int64_t> integers(PyObject* sequence) {
  std::vector<int64_t> values;
  PyObject* fast = PySequence_Fast(sequence, "a sequence of integers");
  if (fast == nullptr) throw std::invalid_argument("not a sequence");
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i)
    values.push_back(static_cast<int64_t>(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i))));
  Py_DECREF(fast);
  if (PyErr_Occurred()) throw std::invalid_argument("not an integer");
  return values;
}

Output output_of(PyObject* described) {
  Output output{true, -1, Shape::kFixed, at::kFloat, {}, {}};
  if (described == Py_None) return output;
  output.absent = false;
  int shape = 0;
  PyObject *dtype = nullptr, *sizes = nullptr, *strides = nullptr;
  if (!PyArg_ParseTuple(described, "iiOOO", &output.same, &shape, &dtype, &sizes, &strides))
    throw std::invalid_argument("not an output");
  output.shape = static_cast<Shape>(shape);
  output.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  output.sizes = integers(sizes);
  output.strides = integers(strides);
  return output;
}

Start start_of(PyObject* described) {
  Start start{};
  unsigned long long function = 0;
  int early = 0, cooperative = 0;
  PyObject* parameters = nullptr;
  if (!PyArg_ParseTuple(described, "K(III)iIIppO", &function, &start.grid[0], &start.grid[1], &start.grid[2],
                        &start.programs, &start.threads, &start.shared, &early, &cooperative, &parameters))
    throw std::invalid_argument("not a launch");
  start.function = reinterpret_cast<CUfunction>(function);
  start.early = early != 0;
  start.cooperative = cooperative != 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parameters); ++i) {
    int constant = 0;
    unsigned long long value = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "pK", &constant, &value))
      throw std::invalid_argument("not a parameter");
    start.parameters.push_back({constant != 0, constant ? 0 : static_cast<uint32_t>(value), value});
  }
  return start;
}

// learn(pass, policy, options, inputs, any_rows, device, words, offsets, workspaces, rules, starts, outputs)
PyObject* learn(PyObject*, PyObject* arguments) {
  int pass = 0, any_rows = 0, device = 0;
  unsigned policy = 0;
  long long words = 0;
  PyObject *options, *given, *offsets, *workspaces, *rules, *starts, *outputs;
  if (!PyArg_ParseTuple(arguments, "iIOO!piLOOOOO", &pass, &policy, &options, &PyTuple_Type, &given, &any_rows,
                        &device, &words, &offsets, &workspaces, &rules, &starts, &outputs))
    return nullptr;
  HANDLE_TH_ERRORS
  uint32_t number = 0;
  if (!numbered(g_options, options, number)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  Inputs inputs;
  if (!unpack(&PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), inputs)) Py_RETURN_NONE;
  for (const Tensor& tensor : inputs)
    if (tensor.defined() && !is_plain(tensor)) Py_RETURN_NONE;
  auto replay = std::make_shared<Replay>();
  replay->device = device;
  replay->words = words;
  replay->offsets = integers(offsets);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(workspaces); ++i) {
    long long size = 0;
    const char* purpose = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(workspaces, i), "Ls", &size, &purpose)) return nullptr;
    replay->workspaces.push_back({size, purpose});
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rules); ++i) {
    const auto rule = integers(PyTuple_GET_ITEM(rules, i));
    replay->rules.emplace_back(rule.at(0), rule.at(1));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(starts); ++i)
    replay->starts.push_back(start_of(PyTuple_GET_ITEM(starts, i)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
    replay->outputs.push_back(output_of(PyTuple_GET_ITEM(outputs, i)));
  std::string key;
  const bool may_differ = key_of_any_rows(key, pass, policy, number, inputs);
  if (may_differ) keep(key, any_rows ? replay : nullptr);
  if (!may_differ || !any_rows) {
    key_of_shapes(key, pass, policy, number, inputs);
    keep(key, replay);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
