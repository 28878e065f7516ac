// The only file that knows Python. Every argument is checked here, once and completely; the kernels trust.
//
// Tensors come as Python objects and are asked for what a torch.Tensor tells about itself, so that nothing is compiled
// against torch. A check that fails raises ValueError with one sentence that starts with the argument's name.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "adam.h"

namespace py = pybind11;

namespace deep_offload {
namespace {

constexpr int kMaxThreads = 4096;

[[noreturn]] void refuse(const std::string& sentence) { throw py::value_error(sentence); }

struct Tensor {
  const char* name;
  std::string dtype;  // as torch prints it, without "torch."
  uintptr_t begin;
  int64_t numel;
  int64_t itemsize;

  uintptr_t end() const { return begin + static_cast<uintptr_t>(numel * itemsize); }
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(begin);
  }
};

std::string dtype_name(const py::handle& tensor) {
  const std::string name = py::str(tensor.attr("dtype"));
  const std::string prefix = "torch.";
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

std::string join(const std::vector<std::string>& names, const char* separator) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : separator) + name;
  return text;
}

// Read what `object` tells about itself; refuse it unless it is a contiguous CPU tensor of a dtype in `allowed`, with
// `dim` dimensions.
Tensor inspect(const char* name, const py::handle& object, const std::vector<std::string>& allowed, int dim) {
  const std::string expected = std::string(name) + ": expected a contiguous CPU tensor of " + join(allowed, " or ") +
                               " with " + std::to_string(dim) + " dimension(s), got ";
  if (!py::hasattr(object, "data_ptr") || !py::hasattr(object, "is_contiguous")) {
    refuse(expected + std::string(py::str(py::type::of(object))));
  }
  const std::string device = py::str(object.attr("device").attr("type"));
  if (device != "cpu") refuse(expected + "a tensor on " + device);
  const std::string dtype = dtype_name(object);
  bool is_allowed = false;
  for (const std::string& one : allowed) is_allowed = is_allowed || one == dtype;
  if (!is_allowed) refuse(expected + dtype);
  if (object.attr("dim")().cast<int>() != dim) refuse(expected + std::string(py::str(object.attr("shape"))));
  if (!object.attr("is_contiguous")().cast<bool>()) {
    refuse(expected + "one that is not contiguous (an update of a copy would be lost)");
  }
  Tensor tensor{name, dtype, object.attr("data_ptr")().cast<uintptr_t>(), object.attr("numel")().cast<int64_t>(),
                object.attr("element_size")().cast<int64_t>()};
  if (tensor.begin % static_cast<uintptr_t>(tensor.itemsize) != 0) {
    refuse(std::string(name) + ": its address is not a multiple of its element's size; allocate it aligned");
  }
  return tensor;
}

void check_numel(const Tensor& tensor, int64_t numel, const char* like) {
  if (tensor.numel != numel) {
    refuse(std::string(tensor.name) + ": expected " + std::to_string(numel) + " elements as in " + like + ", got " +
           std::to_string(tensor.numel));
  }
}

bool overlap(const Tensor& a, const Tensor& b) { return a.begin < b.end() && b.begin < a.end(); }

// No two arrays may share memory, but for a 16-bit weight that lies exactly over its 16-bit gradient.
void check_aliasing(const std::vector<Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = i + 1; j < tensors.size(); ++j) {
      const Tensor &a = tensors[i], &b = tensors[j];
      if (!overlap(a, b)) continue;
      const bool weight_over_grad = std::string(a.name) == "grad" && std::string(b.name) == "weight";
      if (weight_over_grad && a.begin == b.begin && a.itemsize == 2 && b.itemsize == 2) continue;
      refuse(std::string(b.name) + ": it overlaps " + a.name +
             " in memory; only a 16-bit weight may lie over a gradient, and then exactly over a 16-bit one");
    }
  }
}

int check_threads(int64_t num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    refuse("num_threads: expected 1 to " + std::to_string(kMaxThreads) + ", got " + std::to_string(num_threads));
  }
  return static_cast<int>(num_threads);
}

Dtype dtype_of(const Tensor& tensor) {
  if (tensor.dtype == "float32") return Dtype::kFloat32;
  return tensor.dtype == "bfloat16" ? Dtype::kBfloat16 : Dtype::kFloat16;
}

const std::vector<std::string> kFloat32Only = {"float32"};
const std::vector<std::string> kAnyFloat = {"float32", "bfloat16", "float16"};

// Check the five arrays of an update (weight may be None) and return them with their common number of elements.
std::pair<AdamArrays, int64_t> check_arrays(const py::object& master, const py::object& exp_avg,
                                            const py::object& exp_avg_sq, const py::object& grad,
                                            const py::object& weight) {
  std::vector<Tensor> tensors = {
      inspect("master", master, kFloat32Only, 1), inspect("exp_avg", exp_avg, kFloat32Only, 1),
      inspect("exp_avg_sq", exp_avg_sq, kFloat32Only, 1), inspect("grad", grad, kAnyFloat, 1)};
  if (!weight.is_none()) tensors.push_back(inspect("weight", weight, kAnyFloat, 1));
  const int64_t numel = tensors[0].numel;
  for (const Tensor& tensor : tensors) check_numel(tensor, numel, "master");
  check_aliasing(tensors);
  AdamArrays arrays{tensors[0].data<float>(), tensors[1].data<float>(), tensors[2].data<float>(),
                    tensors[3].data<void>(),  nullptr,                  dtype_of(tensors[3]),
                    Dtype::kNone};
  if (!weight.is_none()) {
    arrays.weight = tensors[4].data<void>();
    arrays.weight_dtype = dtype_of(tensors[4]);
  }
  return {arrays, numel};
}

// Check that the rows (start, end, class) cover [0, numel) in order, and copy them.
std::vector<Segment> check_segments(const py::object& object, int64_t numel, int64_t num_classes) {
  const Tensor tensor = inspect("segments", object, {"int64"}, 2);
  if (object.attr("shape")[py::int_(1)].cast<int64_t>() != 3) {
    refuse("segments: expected rows of (start, end, class), got shape " + std::string(py::str(object.attr("shape"))));
  }
  const int64_t* values = tensor.data<const int64_t>();
  std::vector<Segment> segments;
  int64_t position = 0;
  for (int64_t row = 0; row < tensor.numel / 3; ++row) {
    const Segment s{values[3 * row], values[3 * row + 1], values[3 * row + 2]};
    const std::string where = "segments: row " + std::to_string(row) + " is (" + std::to_string(s.start) + ", " +
                              std::to_string(s.end) + ", " + std::to_string(s.index) + "); ";
    if (s.start != position || s.end <= s.start) {
      refuse(where + "it must start at " + std::to_string(position) + " and not be empty");
    }
    if (s.index < kHold || s.index >= num_classes) {
      refuse(where + "scalars has " + std::to_string(num_classes) + " rows, so the class must be 0 to " +
             std::to_string(num_classes - 1) + ", or -1 to hold");
    }
    segments.push_back(s);
    position = s.end;
  }
  if (position != numel) {
    refuse("segments: they end at " + std::to_string(position) + "; they must cover all " + std::to_string(numel) +
           " elements");
  }
  return segments;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa* isa : supported_isas()) names.emplace_back(isa->name);
  return names;
}

// `source` is what gave the name: the argument or the environment variable.
const Isa& find_isa(const std::string& name, const char* source) {
  for (const Isa* isa : supported_isas()) {
    if (name == isa->name) return *isa;
  }
  refuse(std::string(source) + ": '" + name + "' is no instruction set that this machine and build support; use one of " +
         join(isa_names(), ", "));
}

const Isa& choose_isa(const py::object& isa) {
  if (!isa.is_none()) return find_isa(py::str(isa), "isa");
  const char* forced = std::getenv("DEEP_OFFLOAD_ISA");
  if (forced != nullptr && *forced != '\0') return find_isa(forced, "DEEP_OFFLOAD_ISA");
  return *supported_isas().front();
}

void py_adam_update(const py::object& master, const py::object& exp_avg, const py::object& exp_avg_sq,
                    const py::object& grad, const py::object& weight, const py::object& segments,
                    const py::object& scalars, double grad_scale, bool decoupled, int64_t num_threads,
                    const py::object& isa) {
  const Isa& chosen = choose_isa(isa);
  const int threads = check_threads(num_threads);
  const auto [arrays, numel] = check_arrays(master, exp_avg, exp_avg_sq, grad, weight);
  const Tensor table = inspect("scalars", scalars, kFloat32Only, 2);
  if (scalars.attr("shape")[py::int_(1)].cast<int64_t>() != kNumScalars) {
    refuse("scalars: expected rows of " + std::to_string(kNumScalars) + " values, got shape " +
           std::string(py::str(scalars.attr("shape"))));
  }
  const std::vector<Segment> rows = check_segments(segments, numel, table.numel / kNumScalars);
  const AdamArrays& checked = arrays;
  const int64_t count = numel;
  const py::gil_scoped_release release;
  adam_update(chosen, checked, count, rows, table.data<const float>(), static_cast<float>(grad_scale), decoupled,
              threads);
}

std::vector<int64_t> py_adam_roads(const py::object& master, const py::object& exp_avg, const py::object& exp_avg_sq,
                                   const py::object& grad, const py::object& scalars, double grad_scale,
                                   const py::object& isa) {
  const Isa& chosen = choose_isa(isa);
  if (chosen.count_roads == nullptr) refuse(std::string("isa: ") + chosen.name + " has one road only");
  const auto arrays = check_arrays(master, exp_avg, exp_avg_sq, grad, py::none());
  if (arrays.first.grad_dtype != Dtype::kFloat32) refuse("grad: expected float32");
  const Tensor row = inspect("scalars", scalars, kFloat32Only, 1);
  check_numel(row, kNumScalars, "a row of scalars");
  const py::gil_scoped_release release;
  return adam_roads(chosen, arrays.first, arrays.second, row.data<const float>(), static_cast<float>(grad_scale));
}

double py_adam_pattern(const py::object& master, const py::object& exp_avg, const py::object& exp_avg_sq,
                       const py::object& grad, const py::object& weight, int64_t num_threads, const py::object& isa) {
  const Isa& chosen = choose_isa(isa);
  const int threads = check_threads(num_threads);
  const auto arrays = check_arrays(master, exp_avg, exp_avg_sq, grad, weight);
  const py::gil_scoped_release release;
  return adam_pattern(chosen, arrays.first, arrays.second, threads);
}

double py_stream_triad(const py::object& a, const py::object& b, const py::object& c, int64_t num_threads) {
  const int threads = check_threads(num_threads);
  const std::vector<Tensor> tensors = {inspect("a", a, kFloat32Only, 1), inspect("b", b, kFloat32Only, 1),
                                       inspect("c", c, kFloat32Only, 1)};
  for (const Tensor& tensor : tensors) check_numel(tensor, tensors[0].numel, "a");
  check_aliasing(tensors);
  const py::gil_scoped_release release;
  return stream_triad(tensors[0].data<float>(), tensors[1].data<const float>(), tensors[2].data<const float>(),
                      tensors[0].numel, threads);
}

void py_first_touch(uintptr_t address, int64_t num_bytes, int64_t num_threads) {
  const int threads = check_threads(num_threads);
  if (address == 0 || address % alignof(float) != 0) refuse("address: expected a multiple of 4 that is not 0");
  if (num_bytes < 0) refuse("num_bytes: expected at least 0, got " + std::to_string(num_bytes));
  const py::gil_scoped_release release;
  first_touch(reinterpret_cast<void*>(address), num_bytes, threads);
}

}  // namespace
}  // namespace deep_offload

PYBIND11_MODULE(_C, module) {
  using namespace deep_offload;
  module.doc() = "CPU kernels of deep_offload; call them through deep_offload.kernels.cpu.";
  module.def("supported_isas", &isa_names, "Names of the instruction sets that this machine and build run, best first.");
  module.def("selected_isa", [] { return std::string(choose_isa(py::none()).name); },
             "Name of the instruction set in use: DEEP_OFFLOAD_ISA, or the best supported one.");
  module.def("adam_update", &py_adam_update, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("grad"), py::arg("weight"), py::arg("segments"), py::arg("scalars"), py::arg("grad_scale"),
             py::arg("decoupled"), py::arg("num_threads"), py::arg("isa") = py::none(),
             "Update in place, see deep_offload.kernels.cpu.adam_update. Releases the GIL.");
  module.def("adam_roads", &py_adam_roads, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("grad"), py::arg("scalars"), py::arg("grad_scale"), py::arg("isa"),
             "Update with one row of scalars and decoupled decay; the numbers of vectors [plain, scaled, wide].");
  module.def("adam_pattern", &py_adam_pattern, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("grad"), py::arg("weight"), py::arg("num_threads"), py::arg("isa") = py::none(),
             "Seconds of the update's reads and writes without its arithmetic. Destroys the contents.");
  module.def("stream_triad", &py_stream_triad, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("num_threads"),
             "Seconds of a = b + 3 * c with streaming stores: 12 bytes of memory traffic an element.");
  module.def("first_touch", &py_first_touch, py::arg("address"), py::arg("num_bytes"), py::arg("num_threads"),
             "Zero memory so that each page is first touched by the thread that will update it.");
}
