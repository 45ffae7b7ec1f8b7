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

#include "call_keys.h"
#include "replay.h"
#include "replay_call.h"
#include "state.h"
#include "tensors.h"

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The inputs of a forward pass, in the order of `arguments.inputs.NormInputs`; gradients have the same order.
constexpr size_t kInputs = 7, kWeight = 1, kBias = 2, kResidual = 3;

// The derivative of a norm; it holds the inputs of the forward pass, then mean and rstd.
struct NormBackward : public Node {
  const DifferentiableCall* call = nullptr;  // There is one such object, and it is never freed.
  uint32_t policy = 0;
  std::array<SavedVariable, kInputs + 2> saved_variables;
  std::array<bool, kInputs + 2> is_present{};  // Of these variables; the others are undefined.

  std::string name() const override { return "FusedNormBackward"; }

  void release_variables() override {
    for (auto& variable : saved_variables) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    Inputs inputs(saved_variables.size());
    for (size_t place = 0; place < saved_variables.size(); ++place)
      if (is_present[place]) inputs[place] = saved_variables[place].unpack();
    const Tensor residual = inputs[kResidual];
    const Tensor dy = gradients[0];
    const bool parameter_gradients = task_should_compute_output(kWeight) || task_should_compute_output(kBias);
    const Tensor dresidual_out = gradients.size() > 1 && residual.defined() ? gradients[1] : Tensor();
    if (dy.defined() && !c10::GradMode::is_enabled() && !is_observed()) {
      inputs.push_back(dy);
      inputs.push_back(dresidual_out);
      std::array<Tensor, kMaxResults> results;
      const uint32_t options =
          parameter_gradients ? call->options_with_parameter_gradients : call->options_without_parameter_gradients;
      const auto replay = find_replay(call->backward_pass, policy, options, inputs);
      if (replay && replay_call(*replay, inputs, results)) {
        Tensor& dresidual = results[kResidual];
        if (dresidual.defined() && dresidual.scalar_type() != residual.scalar_type())
          dresidual = dresidual.to(residual.scalar_type());
        return {results.begin(), results.end()};
      }
      inputs.resize(saved_variables.size());
    }
    return run_in_python(inputs, dy, dresidual_out, parameter_gradients, *call);
  }

  // Calls the backward pass in Python.
  static variable_list run_in_python(const Inputs& inputs, const Tensor& dy, const Tensor& dresidual_out,
                                     bool parameter_gradients, const DifferentiableCall& call) {
    pybind11::gil_scoped_acquire lock;
    const auto count = static_cast<Py_ssize_t>(inputs.size());
    PyObject* values = PyTuple_New(count);
    for (Py_ssize_t place = 0; place < count; ++place) PyTuple_SET_ITEM(values, place, wrap_tensor(inputs[place]));
    PyObject* done = PyObject_CallFunction(g_run_backward, "ONNNO", call.settings, values, wrap_tensor(dy),
                                           wrap_tensor(dresidual_out), parameter_gradients ? Py_True : Py_False);
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
std::pair<Made*, Pointer> make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    auto* node = new Made();
    return {node, Pointer(node, [](auto* each) { deleteNode(static_cast<typename Pointer::element_type*>(each)); })};
  } else {
    auto owner = c10::make_intrusive<Made>();
    auto* node = owner.get();
    return {node, Pointer(std::move(owner))};
  }
}

// Whether something observes torch's calls, or a tensor has another class or a tangent: then Python makes the call.
bool is_call_observed(PyObject* const* tensors, size_t count) {
  if (is_observed()) return true;
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

// run_differentiable(settings, policy, *inputs) -> (y, residual_out) | None
PyObject* run_differentiable(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  uint32_t number = 0;
  if (!find_number(g_differentiable_numbers, arguments[0], number)) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject* const* tensors = arguments + 2;
  if (is_call_observed(tensors, kInputs)) Py_RETURN_NONE;
  HANDLE_TH_ERRORS
  const DifferentiableCall& call = g_differentiable_calls[number];
  Inputs inputs;
  inputs.reserve(kInputs);
  if (!unpack_tensors(tensors, kInputs, inputs)) Py_RETURN_NONE;
  bool differentiated = false;
  if (c10::GradMode::is_enabled())
    for (const Tensor& tensor : inputs) differentiated |= tensor.defined() && tensor.requires_grad();
  const auto policy = static_cast<uint32_t>(PyLong_AsLong(arguments[1]));
  const uint32_t options = differentiated ? call.options_with_statistics : call.options_without_statistics;
  const auto replay = find_replay(call.forward_pass, policy, options, inputs);
  std::array<Tensor, kMaxResults> results;
  if (!replay || !replay_call(*replay, inputs, results)) Py_RETURN_NONE;
  if (differentiated) {
    auto [node, owner] = make_node<decltype(torch::autograd::Edge::function)>();
    node->call = &call;
    node->policy = policy;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    for (size_t place = 0; place < node->saved_variables.size(); ++place) {
      // The results are y, mean, rstd and others.
      const Tensor& value = place < kInputs ? inputs[place] : results[place - kInputs + 1];
      node->is_present[place] = value.defined();
      if (value.defined()) node->saved_variables[place] = SavedVariable(value, false);
    }
    torch::autograd::set_history(results[0], owner);
    if (results[3].defined()) torch::autograd::set_history(results[3], owner);
  }
  PyObject* pair = PyTuple_New(2);
  PyTuple_SET_ITEM(pair, 0, wrap_tensor(results[0]));
  PyTuple_SET_ITEM(pair, 1, wrap_tensor(results[3]));
  return pair;
  END_HANDLE_TH_ERRORS
}

// define_differentiable(settings, forward_pass, options_with_statistics, options_without_statistics, backward_pass,
//                       options_with_parameter_gradients, options_without_parameter_gradients)
PyObject* define_differentiable(PyObject*, PyObject* arguments) {
  PyObject* settings = nullptr;
  PyObject *with_statistics = nullptr, *without_statistics = nullptr;
  PyObject *with_parameter_gradients = nullptr, *without_parameter_gradients = nullptr;
  int forward_pass = 0, backward_pass = 0;
  if (!PyArg_ParseTuple(arguments, "OiOOiOO", &settings, &forward_pass, &with_statistics, &without_statistics,
                        &backward_pass, &with_parameter_gradients, &without_parameter_gradients))
    return nullptr;
  DifferentiableCall call{forward_pass, backward_pass, 0, 0, 0, 0, settings};
  const std::pair<PyObject*, uint32_t*> options[] = {
      {with_statistics, &call.options_with_statistics},
      {without_statistics, &call.options_without_statistics},
      {with_parameter_gradients, &call.options_with_parameter_gradients},
      {without_parameter_gradients, &call.options_without_parameter_gradients},
  };
  for (const auto& [given, number] : options) {
    if (find_or_assign_number(g_option_numbers, given, *number)) continue;
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  uint32_t number = 0;
  if (find_number(g_differentiable_numbers, settings, number)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return nullptr;
  Py_INCREF(settings);
  if (!find_or_assign_number(g_differentiable_numbers, settings, number)) {
    Py_DECREF(settings);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  g_differentiable_calls.push_back(call);
  Py_RETURN_NONE;
}

}  // namespace
