// A device in the computer's own memory. Every function of torch reaches it through the dispatcher as it would reach
// CUDA; views share memory, and all others are computed on copies by the CPU. See second_device.py.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

constexpr auto PLACE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

struct Memory final : c10::Allocator {
  static void release(void* data) { c10::free_cpu(data); }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &release, c10::Device(PLACE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(PLACE, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return PLACE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(PLACE, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// The same memory as a tensor of the CPU.
at::Tensor here(const at::Tensor& t) {
  if (t.device().type() != PLACE) return t;
  auto options = t.options().device(c10::kCPU);
  void* data = t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr;
  auto found = at::for_blob(data, t.sizes()).strides(t.strides()).options(options).target_device(c10::kCPU).make_tensor();
  found._set_conj(t.is_conj());
  found._set_neg(t.is_neg());
  return found;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.numel()) here(to).copy_(here(from));
  return to;
}

const at::Tensor& resize_there(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size, std::nullopt);
  return t;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_there(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& t, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, source, offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& t, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / t.itemsize());
  return at::native::set_storage_cpu_(t, source, 0, {count}, {1});
}

// Torch asks every device for its own convolution, instead of falling back.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> added = bias && bias->defined() ? std::optional(here(*bias)) : std::nullopt;
  return at::convolution(here(x), here(weight), added, stride, padding, dilation, transposed, output_padding, groups)
      .to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  auto [a, b, c] =
      at::convolution_backward(here(gradient), here(x), here(weight), at::IntArrayRef(weight.size(transposed ? 1 : 0)),
                               stride, padding, dilation, transposed, output_padding, groups, wanted);
  auto there = [&](const at::Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {there(a), there(b), there(c)};
}

// Refuses tensors of two devices, as CUDA does; numbers go anywhere, and indices may come from the CPU.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool there = false, elsewhere = false;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    bool is_there = t.device().type() == PLACE;
    there |= is_there;
    elsewhere |= !is_there && t.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) look(t);
    if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorVector())
        if (t) look(*t);
  }
  const auto& name = op.schema().name();
  bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  TORCH_CHECK(!(there && elsewhere) || indexes, name, " got tensors of two devices");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_there);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// A copy resolves conjugates and signs itself; torch's fallback for other functions would copy them to do so.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
