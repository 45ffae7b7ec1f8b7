// The key that distinguishes calls of a pass, as in `launch.kinds`, and the replay of a call of a known kind.

#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

#include <ATen/ATen.h>

#include "replay.h"
#include "state.h"

namespace {

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Whether kernels may read a tensor's memory through its address.
bool is_plain(const Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet wrapped(
      {DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Functionalize, DispatchKey::Negative, DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(wrapped) && tensor.has_storage();
}

void put_type(std::string& key, const Tensor& tensor) {
  put(key, static_cast<int8_t>(tensor.scalar_type()));
  put(key, static_cast<int8_t>(tensor.device().type()));
  put(key, static_cast<int8_t>(tensor.device().index()));
}

void put_sizes(std::string& key, at::IntArrayRef sizes) {
  put(key, static_cast<int8_t>(sizes.size()));
  key.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
}

void begin(std::string& key, int pass, uint32_t policy, uint32_t options, char kind) {
  key.clear();
  key.push_back(kind);
  put(key, pass);
  put(key, policy);
  put(key, options);
}

void put_whole(std::string& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(0);
    return;
  }
  key.push_back(1);
  put_type(key, tensor);
  put_sizes(key, tensor.sizes());
  put_sizes(key, tensor.strides());
}

// The key as in `launch.kinds`; false if the memory layout of the rows depends on their number.
bool key_of_any_rows(std::string& key, int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  const std::vector<Role>& roles = g_passes[pass].roles;
  const Tensor& x = inputs[0];
  if (roles.empty() || x.dim() == 0) return false;
  begin(key, pass, policy, options, 'r');
  const auto shape = x.sizes();
  put(key, shape.back());
  for (size_t place = 0; place < inputs.size(); ++place) {
    const Tensor& tensor = inputs[place];
    if (!tensor.defined()) {
      key.push_back(0);
      continue;
    }
    const bool contiguous = tensor.is_contiguous();
    const Role role = place < roles.size() ? roles[place] : Role::kParameter;
    if (role == Role::kLikeX) {
      if (tensor.sizes() != shape) return false;
      if (!contiguous && shape.size() != 2) return false;
      key.push_back(contiguous ? 1 : 2);
      put_type(key, tensor);
      if (!contiguous) put_sizes(key, tensor.strides());
    } else if (role == Role::kOfRows) {
      if (!contiguous || tensor.sizes() != shape.slice(0, shape.size() - 1)) return false;
      key.push_back(1);
      put_type(key, tensor);
    } else {
      if (!contiguous) return false;
      key.push_back(1);
      put_type(key, tensor);
      put_sizes(key, tensor.sizes());
    }
  }
  return true;
}

void key_of_shapes(std::string& key, int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  begin(key, pass, policy, options, 's');
  for (const Tensor& tensor : inputs) put_whole(key, tensor);
}

std::shared_ptr<Replay> find(int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  for (const Tensor& tensor : inputs)
    if (tensor.defined() && !is_plain(tensor)) return nullptr;
  thread_local std::string key;
  std::shared_lock lock(g_mutex);
  if (key_of_any_rows(key, pass, policy, options, inputs)) {
    const auto found = g_known.find(key);
    if (found == g_known.end()) return nullptr;
    if (found->second) return found->second;
  }
  key_of_shapes(key, pass, policy, options, inputs);
  const auto found = g_known.find(key);
  return found == g_known.end() ? nullptr : found->second;
}

void keep(const std::string& key, std::shared_ptr<Replay> replay) {
  std::unique_lock lock(g_mutex);
  if (g_known.find(key) == g_known.end()) {
    if (g_known.size() >= g_most) {
      g_known.erase(g_order.front());
      g_order.pop_front();
    }
    g_order.push_back(key);
  }
  g_known[key] = std::move(replay);
}

}  // namespace
