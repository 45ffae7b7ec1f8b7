// The differentiable call, and its derivative.

#pragma once

#include <Python.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "call.h"
#include "kinds.h"
#include "replay.h"
#include "state.h"
#include "tensors.h"

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The inputs of a forward pass, in the order of `arguments.inputs.NormInputs`; gradients have the same order.
constexpr size_t kInputs = 6, kWeight = 1, kBias = 2, kResidual = 3;

// The derivative of a norm; it holds the inputs of the forward pass, then mean and rstd.
struct NormBackward : public Node {
  const Differentiable* what = nullptr;  // There is one such object, and it is never freed.
  uint32_t policy = 0;
  std::array<SavedVariable, kInputs + 2> saved;
  std::array<bool, kInputs + 2> present{};

  std::string name() const override { return "FusedNormBackward"; }

  void release_variables() override {
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    Inputs inputs(saved.size());
    for (size_t place = 0; place < saved.size(); ++place)
      if (present[place]) inputs[place] = saved[place].unpack();
    const Tensor residual = inputs[kResidual];
    const Tensor dy = gradients[0];
    const bool trains = task_should_compute_output(kWeight) || task_should_compute_output(kBias);
    const Tensor outside = gradients.size() > 1 && residual.defined() ? gradients[1] : Tensor();
    if (dy.defined() && !c10::GradMode::is_enabled() && !is_watched()) {
      inputs.push_back(dy);
      inputs.push_back(outside);
      std::array<Tensor, kMostResults> results;
      const auto replay = find(what->backward, policy, trains ? what->back : what->frozen, inputs);
      if (replay && make(*replay, inputs, results)) {
        Tensor& dresidual = results[kResidual];
        if (dresidual.defined() && dresidual.scalar_type() != residual.scalar_type())
          dresidual = dresidual.to(residual.scalar_type());
        return {results.begin(), results.end()};
      }
      inputs.resize(saved.size());
    }
    return through_python(inputs, dy, outside, trains, *what);
  }

  static variable_list through_python(const Inputs& inputs, const Tensor& dy, const Tensor& outside, bool trains,
                                      const Differentiable& what) {
    pybind11::gil_scoped_acquire lock;
    const auto count = static_cast<Py_ssize_t>(inputs.size());
    PyObject* values = PyTuple_New(count);
    for (Py_ssize_t place = 0; place < count; ++place) PyTuple_SET_ITEM(values, place, wrapped(inputs[place]));
    PyObject* done = PyObject_CallFunction(g_backward, "ONNNO", what.settings, values, wrapped(dy), wrapped(outside),
                                           trains ? Py_True : Py_False);
    if (done == nullptr) throw python_error();
    variable_list results;
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(done); ++place) {
      PyObject* item = PyTuple_GET_ITEM(done, place);
      results.push_back(item == Py_None ? Tensor() : THPVariable_Unpack(item));
    }
    Py_DECREF(done);
    return results;
  }
};

// A node and its owning pointer, whose type differs in newer versions of torch.
template <class Pointer, class Made = NormBackward>
std::pair<Made*, Pointer> new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    auto* node = new Made();
    return {node, Pointer(node, [](auto* each) { deleteNode(static_cast<typename Pointer::element_type*>(each)); })};
  } else {
    auto owner = c10::make_intrusive<Made>();
    auto* node = owner.get();
    return {node, Pointer(std::move(owner))};
  }
}

bool is_observed(PyObject* const* tensors, size_t count) {
  if (is_watched()) return true;
  for (size_t place = 0; place < count; ++place) {
    PyObject* tensor = tensors[place];
    if (tensor == Py_None) continue;
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != PyTuple_GET_ITEM(g_tensor_types, 0) && type != PyTuple_GET_ITEM(g_tensor_types, 1)) return true;
    // Tangents would be lost.
    if (THPVariable_Unpack(tensor)._fw_grad(0).defined()) return true;
  }
  return false;
}

// differentiable(settings, policy, *inputs) -> (y, residual_out) | None
PyObject* differentiable(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  uint32_t specification = 0;
  if (!number_of(g_specifications, arguments[0], specification)) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject* const* tensors = arguments + 2;
  if (is_observed(tensors, kInputs)) Py_RETURN_NONE;
  HANDLE_TH_ERRORS
  const Differentiable& what = g_differentiable[specification];
  Inputs inputs;
  inputs.reserve(kInputs);
  if (!unpack(tensors, kInputs, inputs)) Py_RETURN_NONE;
  bool differentiated = false;
  if (c10::GradMode::is_enabled())
    for (const Tensor& tensor : inputs) differentiated |= tensor.defined() && tensor.requires_grad();
  const auto policy = static_cast<uint32_t>(PyLong_AsLong(arguments[1]));
  const auto replay = find(what.forward, policy, differentiated ? what.saving : what.plain, inputs);
  std::array<Tensor, kMostResults> results;
  if (!replay || !make(*replay, inputs, results)) Py_RETURN_NONE;
  if (differentiated) {
    auto [node, owner] = new_node<decltype(torch::autograd::Edge::function)>();
    node->what = &what;
    node->policy = policy;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    for (size_t place = 0; place < node->saved.size(); ++place) {
      // The results are y, mean, rstd and others.
      const Tensor& value = place < kInputs ? inputs[place] : results[place - kInputs + 1];
      node->present[place] = value.defined();
      if (value.defined()) node->saved[place] = SavedVariable(value, false);
    }
    torch::autograd::set_history(results[0], owner);
    if (results[3].defined()) torch::autograd::set_history(results[3], owner);
  }
  PyObject* pair = PyTuple_New(2);
  PyTuple_SET_ITEM(pair, 0, wrapped(results[0]));
  PyTuple_SET_ITEM(pair, 1, wrapped(results[3]));
  return pair;
  END_HANDLE_TH_ERRORS
}

// define_differentiable(settings, forward, saving, plain, backward, back, frozen)
PyObject* define_differentiable(PyObject*, PyObject* arguments) {
  PyObject *settings = nullptr, *saving = nullptr, *plain = nullptr, *back = nullptr, *frozen = nullptr;
  int forward = 0, backward = 0;
  if (!PyArg_ParseTuple(arguments, "OiOOiOO", &settings, &forward, &saving, &plain, &backward, &back, &frozen))
    return nullptr;
  Differentiable what{forward, backward, 0, 0, 0, 0, settings};
  if (!numbered(g_options, saving, what.saving) || !numbered(g_options, plain, what.plain) ||
      !numbered(g_options, back, what.back) || !numbered(g_options, frozen, what.frozen)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  uint32_t number = 0;
  if (number_of(g_specifications, settings, number)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return nullptr;
  Py_INCREF(settings);
  if (!numbered(g_specifications, settings, number)) {
    Py_DECREF(settings);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  g_differentiable.push_back(what);
  Py_RETURN_NONE;
}

}  // namespace
