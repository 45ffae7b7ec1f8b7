// The keys that distinguish calls, as those of Python's replays do, and the replays that are stored by them.

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

// Appends the bytes of a number.
template <class T>
void append_value(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Whether kernels may read a tensor's memory through its address.
bool is_plain_tensor(const Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet not_plain(
      {DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Functionalize, DispatchKey::Negative, DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(not_plain) &&
         tensor.has_storage();
}

// Appends a tensor's dtype and device.
void append_type(std::string& key, const Tensor& tensor) {
  append_value(key, static_cast<int8_t>(tensor.scalar_type()));
  append_value(key, static_cast<int8_t>(tensor.device().type()));
  append_value(key, static_cast<int8_t>(tensor.device().index()));
}

// Appends a shape or strides.
void append_sizes(std::string& key, at::IntArrayRef sizes) {
  append_value(key, static_cast<int8_t>(sizes.size()));
  key.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
}

// Begins a key; its first byte distinguishes the keys for any rows from those for shapes.
void start_key(std::string& key, int pass, uint32_t policy, uint32_t options, char kind) {
  key.clear();
  key.push_back(kind);
  append_value(key, pass);
  append_value(key, policy);
  append_value(key, options);
}

// Appends a tensor's dtype, device, shape and strides.
void append_tensor(std::string& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(0);
    return;
  }
  key.push_back(1);
  append_type(key, tensor);
  append_sizes(key, tensor.sizes());
  append_sizes(key, tensor.strides());
}

// Writes the key that calls with any number of rows share; false if the memory layout of rows depends on their number.
bool write_key_for_any_rows(std::string& key, int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  const std::vector<ShapeRole>& roles = g_passes.at(pass).roles;
  const Tensor& x = inputs[0];
  if (roles.empty() || x.dim() == 0) return false;
  start_key(key, pass, policy, options, 'r');
  const auto shape = x.sizes();
  append_value(key, shape.back());
  for (size_t place = 0; place < inputs.size(); ++place) {
    const Tensor& tensor = inputs[place];
    if (!tensor.defined()) {
      key.push_back(0);
      continue;
    }
    const bool contiguous = tensor.is_contiguous();
    const ShapeRole role = place < roles.size() ? roles[place] : ShapeRole::kParameter;
    if (role == ShapeRole::kLikeX) {
      if (tensor.sizes() != shape) return false;
      if (!contiguous && shape.size() != 2) return false;
      key.push_back(contiguous ? 1 : 2);
      append_type(key, tensor);
      if (!contiguous) append_sizes(key, tensor.strides());
    } else if (role == ShapeRole::kPerRow) {
      if (!contiguous || tensor.sizes() != shape.slice(0, shape.size() - 1)) return false;
      key.push_back(1);
      append_type(key, tensor);
    } else {
      if (!contiguous) return false;
      key.push_back(1);
      append_type(key, tensor);
      append_sizes(key, tensor.sizes());
    }
  }
  return true;
}

// Writes the key of a call with these shapes.
void write_key_for_shapes(std::string& key, int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  start_key(key, pass, policy, options, 's');
  for (const Tensor& tensor : inputs) append_tensor(key, tensor);
}

// Finds the replay of a call; null if none is stored, or if kernels may not read an input.
std::shared_ptr<CallReplay> find_replay(int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  for (const Tensor& tensor : inputs)
    if (tensor.defined() && !is_plain_tensor(tensor)) return nullptr;
  thread_local std::string key;
  std::shared_lock lock(g_mutex);
  if (write_key_for_any_rows(key, pass, policy, options, inputs)) {
    const auto found = g_replays.find(key);
    if (found == g_replays.end()) return nullptr;
    if (found->second) return found->second;
  }
  write_key_for_shapes(key, pass, policy, options, inputs);
  const auto found = g_replays.find(key);
  return found == g_replays.end() ? nullptr : found->second;
}

// Stores a replay, null if calls need separate ones, in place of the oldest if there are too many.
void store_replay(const std::string& key, std::shared_ptr<CallReplay> replay) {
  std::unique_lock lock(g_mutex);
  if (g_replays.find(key) == g_replays.end()) {
    if (g_replays.size() >= g_max_replays) {
      g_replays.erase(g_replay_keys.front());
      g_replay_keys.pop_front();
    }
    g_replay_keys.push_back(key);
  }
  g_replays[key] = std::move(replay);
}

}  // namespace
