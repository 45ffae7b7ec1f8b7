// Replays of known calls without Python: what `launch.replay` and `launch.recipe` do, and the differentiable call.
//
// Python learns a call and describes it here; a call of the same kind is then recognised, its results are allocated
// and its kernels launched by the driver, with no Python in between.  Whatever is not known here is answered with
// None, and Python goes its own way.

#include <Python.h>

#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cuda.h>
#include <dlfcn.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr size_t kMostResults = 6;
constexpr Py_ssize_t kMostOptions = 1 << 16;

using Inputs = std::vector<Tensor>;  // Undefined where nothing came.

// Where a parameter of a kernel comes from: `kSlot` of the addresses and numbers of a call, or a constant.
struct Parameter {
  bool constant;
  uint32_t slot;
  uint64_t bits;
};

struct Start {
  CUfunction function;
  std::array<unsigned, 3> grid;
  int programs;  // The slot with the first size of the grid; -1 where that is always the same.
  unsigned threads, shared;
  bool early, cooperative;
  std::vector<Parameter> parameters;
};

enum class Shape { kFixed, kX, kRows };

struct Output {
  bool absent;
  int same;  // The earlier result that this one is; -1 where it is one of its own.
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
  // Workspaces of streams that launched this before.
  std::vector<std::pair<void*, std::vector<Tensor>>> of_streams;
};

struct Pass {
  uint32_t like_x, of_rows;
};

struct Differentiable {
  int forward, backward;        // Passes.
  uint32_t saving, plain, back;  // Options: forward with and without statistics, and backward.
  bool groups;
  PyObject* settings;  // What Python's way of the backward pass takes.
};

std::shared_mutex g_mutex;
std::vector<Pass> g_passes;
std::unordered_map<std::string, std::shared_ptr<Replay>> g_known;  // Null where each number of rows is a kind.
std::deque<std::string> g_order;
size_t g_most = 4096;

// All that follows is touched with the interpreter's lock held.
PyObject* g_options = nullptr;         // Options, by what they are, numbered.
PyObject* g_specifications = nullptr;  // Differentiable calls, by their settings, numbered.
std::deque<Differentiable> g_differentiable;
PyObject* g_backward = nullptr;   // Python's way of a backward pass.
PyObject* g_workspace = nullptr;  // Python's workspaces.
PyObject* g_launch = nullptr;     // Takes launches in place of the driver, in tests.
PyObject* g_tensor_types = nullptr;

using LaunchKernel = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
using IsCapturing = CUresult (*)(CUstream, CUstreamCaptureStatus*);
using RetainContext = CUresult (*)(CUcontext*, CUdevice);
using SetContext = CUresult (*)(CUcontext);
LaunchKernel g_launch_kernel = nullptr;
IsCapturing g_is_capturing = nullptr;
RetainContext g_retain_context = nullptr;
SetContext g_set_context = nullptr;

// Makes torch's context of a device the thread's, which has none before its first call of the CUDA runtime.
CUresult enter_context(int device) {
  CUcontext context = nullptr;
  const CUresult result = g_retain_context(&context, device);
  return result == CUDA_SUCCESS ? g_set_context(context) : result;
}

void* current_stream(int device) {
#ifdef WITH_CUDA
  if (device >= 0) return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
#endif
  return nullptr;
}

bool is_current(int device) {
#ifdef WITH_CUDA
  return device < 0 || c10::cuda::current_device() == device;
#else
  return device < 0;
#endif
}

bool is_captured(int device, void* stream) {
  if (device < 0 || g_is_capturing == nullptr) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  g_is_capturing(static_cast<CUstream>(stream), &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Whether a tensor's memory may be read by its address.
bool is_plain(const Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet wrapped(
      {DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Functionalize, DispatchKey::Negative, DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(wrapped) && tensor.has_storage();
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

// As `launch.kinds` has it; false where the number of rows is part of how they lie.
bool key_of_any_rows(std::string& key, int pass, uint32_t policy, uint32_t options, const Inputs& inputs) {
  const Pass facts = g_passes[pass];
  const Tensor& x = inputs[0];
  if (facts.like_x == 0 || x.dim() == 0) return false;
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
    if (place < facts.like_x) {
      if (tensor.sizes() != shape) return false;
      if (!contiguous && shape.size() != 2) return false;
      key.push_back(contiguous ? 1 : 2);
      put_type(key, tensor);
      if (!contiguous) put_sizes(key, tensor.strides());
    } else if (place < facts.like_x + facts.of_rows) {
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

// The stream's workspaces; false where there are none yet.
bool workspaces_of(Replay& replay, void* stream, std::vector<uint64_t>& slots) {
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

// Hands a launch to Python; only where tests want it so.
void launch_through_python(const Start& start, unsigned x, const std::vector<uint64_t>& values) {
  pybind11::gil_scoped_acquire lock;
  PyObject* list = PyList_New(0);
  for (uint64_t value : values) {
    PyObject* number = PyLong_FromUnsignedLongLong(value);
    PyList_Append(list, number);
    Py_DECREF(number);
  }
  PyObject* done = PyObject_CallFunction(
      g_launch, "K(III)IIiiN", reinterpret_cast<unsigned long long>(start.function), x, start.grid[1], start.grid[2],
      start.threads, start.shared, int(start.early), int(start.cooperative), list);
  if (done == nullptr) throw python_error();
  Py_DECREF(done);
}

void launch(const Start& start, int device, void* stream, const std::vector<uint64_t>& slots) {
  thread_local std::vector<uint64_t> values;
  thread_local std::vector<void*> pointers;
  values.clear();
  for (const Parameter& parameter : start.parameters)
    values.push_back(parameter.constant ? parameter.bits : slots[parameter.slot]);
  const unsigned x = start.programs < 0 ? start.grid[0] : static_cast<unsigned>(slots[start.programs]);
  if (g_launch != nullptr) {
    launch_through_python(start, x, values);
    return;
  }
  // Behind its own parameters every Triton kernel has addresses of two scratch memories, which none here uses.
  values.push_back(0);
  values.push_back(0);
  pointers.clear();
  for (uint64_t& value : values) pointers.push_back(&value);
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config{};
  config.gridDimX = x;
  config.gridDimY = start.grid[1];
  config.gridDimZ = start.grid[2];
  config.blockDimX = start.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = start.shared;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  if (start.early) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (start.cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  CUresult result = g_launch_kernel(&config, start.function, pointers.data(), nullptr);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    result = enter_context(device);
    if (result == CUDA_SUCCESS) result = g_launch_kernel(&config, start.function, pointers.data(), nullptr);
  }
  TORCH_CHECK(result == CUDA_SUCCESS, "cuLaunchKernelEx failed with error ", int(result));
}

// Makes a known call: results in the order of their fields.  False where Python has to.
bool make(Replay& replay, const Inputs& inputs, std::array<Tensor, kMostResults>& results) {
  c10::OptionalDeviceGuard guard;
  if (!is_current(replay.device))
    guard.reset_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(replay.device)));
  at::AutoDispatchBelowADInplaceOrView below;  // Nobody differentiates an allocation.
  const Tensor& x = inputs[0];
  thread_local std::vector<uint64_t> slots;
  slots.clear();
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
    std::vector<uint64_t> found;
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
  Tensor own;  // Held until all is launched: who gets its memory then uses it after these launches.
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

// Whether somebody traces, transforms or watches torch's calls.
bool is_watched() {
  return c10::impl::TorchDispatchModeTLS::stack_len() != 0 || at::impl::torch_function_mode_enabled() ||
         torch::jit::tracer::isTracing() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool number_of(PyObject* numbers, PyObject* what, uint32_t& number) {
  PyObject* found = PyDict_GetItemWithError(numbers, what);
  if (found == nullptr) return false;
  number = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
  return true;
}

bool unpack(PyObject* const* arguments, Py_ssize_t count, Inputs& inputs) {
  inputs.clear();
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyObject* argument = arguments[place];
    if (argument == Py_None) {
      inputs.emplace_back();
    } else if (THPVariable_Check(argument)) {
      inputs.push_back(THPVariable_Unpack(argument));
    } else {
      return false;
    }
  }
  return !inputs.empty() && inputs[0].defined();
}

PyObject* wrapped(const Tensor& tensor) {
  if (!tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(tensor);
}

// again(pass, policy, options, inputs, type) -> result | None
PyObject* again(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  if (is_watched()) Py_RETURN_NONE;
  uint32_t options = 0;
  if (!number_of(g_options, arguments[2], options)) {
    if (PyErr_Occurred()) PyErr_Clear();  // An option without a hash.
    Py_RETURN_NONE;
  }
  HANDLE_TH_ERRORS
  Inputs inputs;
  inputs.reserve(8);
  PyObject* given = arguments[3];
  if (!unpack(&PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), inputs)) Py_RETURN_NONE;
  const int pass = static_cast<int>(PyLong_AsLong(arguments[0]));
  const auto replay = find(pass, static_cast<uint32_t>(PyLong_AsLong(arguments[1])), options, inputs);
  std::array<Tensor, kMostResults> results;
  if (!replay || !make(*replay, inputs, results)) Py_RETURN_NONE;
  const auto fields = static_cast<Py_ssize_t>(replay->outputs.size());
  PyObject* values = PyTuple_New(fields);
  for (Py_ssize_t place = 0; place < fields; ++place) PyTuple_SET_ITEM(values, place, wrapped(results[place]));
  PyObject* packed = PyTuple_Pack(1, values);
  PyObject* result = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(arguments[4]), packed, nullptr);
  Py_DECREF(packed);
  Py_DECREF(values);
  return result;
  END_HANDLE_TH_ERRORS
}

// The derivative of a norm, which knows x, residual, weight, bias, scale, shift, mean and rstd.
struct NormBackward : public Node {
  const Differentiable* what = nullptr;  // Of which there is one for good.
  uint32_t policy = 0;
  std::array<SavedVariable, 8> saved;
  std::array<bool, 8> present{};

  std::string name() const override { return "FusedNormBackward"; }

  void release_variables() override {
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    std::array<Tensor, 8> values;
    for (size_t place = 0; place < saved.size(); ++place)
      if (present[place]) values[place] = saved[place].unpack();
    const auto& [x, residual, weight, bias, scale, shift, mean, rstd] = values;
    const Tensor dy = gradients[0];
    const Tensor outside = gradients.size() > 1 && residual.defined() ? gradients[1] : Tensor();
    if (dy.defined() && !c10::GradMode::is_enabled() && !is_watched()) {
      Inputs inputs{x, dy, residual, outside, mean, rstd, weight, bias};
      if (what->groups) {
        inputs.push_back(scale);
        inputs.push_back(shift);
      }
      std::array<Tensor, kMostResults> results;
      const auto replay = find(what->backward, policy, what->back, inputs);
      if (replay && make(*replay, inputs, results)) {
        auto& [dx, dweight, dbias, dresidual, dscale, dshift] = results;
        if (dresidual.defined() && dresidual.scalar_type() != residual.scalar_type())
          dresidual = dresidual.to(residual.scalar_type());
        return {dx, dresidual, dweight, dbias, dscale, dshift};
      }
    }
    return through_python(values, dy, outside, *what);
  }

  static variable_list through_python(const std::array<Tensor, 8>& values, const Tensor& dy, const Tensor& outside,
                                      const Differentiable& what) {
    pybind11::gil_scoped_acquire lock;
    PyObject* saved = PyTuple_New(8);
    for (Py_ssize_t place = 0; place < 8; ++place) PyTuple_SET_ITEM(saved, place, wrapped(values[place]));
    PyObject* done = PyObject_CallFunction(g_backward, "ONNN", what.settings, saved, wrapped(dy), wrapped(outside));
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

// A node and what owns it, which is another kind of pointer in newer versions of torch.
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

// differentiable(settings, policy, x, residual, weight, bias, scale, shift) -> (y, residual_out) | None
PyObject* differentiable(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  uint32_t specification = 0;
  if (!number_of(g_specifications, arguments[0], specification)) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject* const* tensors = arguments + 2;
  if (is_observed(tensors, 6)) Py_RETURN_NONE;
  HANDLE_TH_ERRORS
  const Differentiable& what = g_differentiable[specification];
  Inputs inputs;
  inputs.reserve(6);
  if (!unpack(tensors, 6, inputs)) Py_RETURN_NONE;
  bool differentiated = false;
  if (c10::GradMode::is_enabled())
    for (const Tensor& tensor : inputs) differentiated |= tensor.defined() && tensor.requires_grad();
  const auto policy = static_cast<uint32_t>(PyLong_AsLong(arguments[1]));
  if (!what.groups) inputs.resize(4);
  const auto replay = find(what.forward, policy, differentiated ? what.saving : what.plain, inputs);
  std::array<Tensor, kMostResults> results;
  if (!replay || !make(*replay, inputs, results)) Py_RETURN_NONE;
  if (differentiated) {
    inputs.resize(6);
    auto [node, owner] = new_node<decltype(torch::autograd::Edge::function)>();
    node->what = &what;
    node->policy = policy;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4],
                                                             inputs[5]));
    for (size_t place = 0; place < 8; ++place) {
      const Tensor& value = place < 6 ? inputs[place] : results[place - 5];
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

PyObject* define_pass(PyObject*, PyObject* arguments) {
  unsigned like_x = 0, of_rows = 0;
  if (!PyArg_ParseTuple(arguments, "II", &like_x, &of_rows)) return nullptr;
  std::unique_lock lock(g_mutex);
  g_passes.push_back({like_x, of_rows});
  return PyLong_FromSize_t(g_passes.size() - 1);
}

// False with no error where there are too many already: whoever draws options at random is left to Python.
bool numbered(PyObject* numbers, PyObject* what, uint32_t& number) {
  if (number_of(numbers, what, number)) return true;
  if (PyErr_Occurred() || PyDict_Size(numbers) >= kMostOptions) return false;
  number = static_cast<uint32_t>(PyDict_Size(numbers));
  PyObject* value = PyLong_FromUnsignedLong(number);
  const bool kept = PyDict_SetItem(numbers, what, value) == 0;
  Py_DECREF(value);
  return kept;
}

// define_differentiable(settings, forward, saving, plain, backward, back, groups)
PyObject* define_differentiable(PyObject*, PyObject* arguments) {
  PyObject *settings = nullptr, *saving = nullptr, *plain = nullptr, *back = nullptr;
  int forward = 0, backward = 0, groups = 0;
  if (!PyArg_ParseTuple(arguments, "OiOOiOp", &settings, &forward, &saving, &plain, &backward, &back, &groups))
    return nullptr;
  Differentiable what{forward, backward, 0, 0, 0, groups != 0, settings};
  if (!numbered(g_options, saving, what.saving) || !numbered(g_options, plain, what.plain) ||
      !numbered(g_options, back, what.back)) {
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

PyObject* forget(PyObject*, PyObject*) {
  std::unique_lock lock(g_mutex);
  g_known.clear();
  g_order.clear();
  Py_RETURN_NONE;
}

PyObject* known(PyObject*, PyObject*) {
  std::shared_lock lock(g_mutex);
  return PyLong_FromSize_t(g_known.size());
}

// set_up(backward, workspace, tensor_types, most, launch)
PyObject* set_up(PyObject*, PyObject* arguments) {
  PyObject *backward, *workspace, *types, *launched;
  unsigned most = 0;
  if (!PyArg_ParseTuple(arguments, "OOO!IO", &backward, &workspace, &PyTuple_Type, &types, &most, &launched))
    return nullptr;
  for (PyObject* each : {backward, workspace, types, launched}) Py_INCREF(each);
  g_backward = backward;
  g_workspace = workspace;
  g_tensor_types = types;
  g_most = most;
  g_launch = launched == Py_None ? nullptr : launched;
  if (g_launch == nullptr && g_launch_kernel == nullptr) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library != nullptr) {
      g_launch_kernel = reinterpret_cast<LaunchKernel>(dlsym(library, "cuLaunchKernelEx"));
      g_is_capturing = reinterpret_cast<IsCapturing>(dlsym(library, "cuStreamIsCapturing"));
      g_retain_context = reinterpret_cast<RetainContext>(dlsym(library, "cuDevicePrimaryCtxRetain"));
      g_set_context = reinterpret_cast<SetContext>(dlsym(library, "cuCtxSetCurrent"));
    }
    if (!g_launch_kernel || !g_is_capturing || !g_retain_context || !g_set_context) {
      PyErr_SetString(PyExc_RuntimeError, "the CUDA driver is absent, or older than 12.0");
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction as_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {
    {"again", as_function(again), METH_FASTCALL, nullptr},
    {"differentiable", as_function(differentiable), METH_FASTCALL, nullptr},
    {"define_pass", define_pass, METH_VARARGS, nullptr},
    {"define_differentiable", define_differentiable, METH_VARARGS, nullptr},
    {"learn", learn, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"known", known, METH_NOARGS, nullptr},
    {"set_up", set_up, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "fusednorm_host", nullptr, -1, g_methods};

}  // namespace

PyMODINIT_FUNC PyInit_fusednorm_host() {
  g_options = PyDict_New();
  g_specifications = PyDict_New();
  return PyModule_Create(&g_module);
}
