#include "call.h"

#include <initializer_list>
#include <optional>
#include <string_view>

namespace latent_tail {
namespace {

constexpr auto kBf16 = ffi::DataType::BF16;

ffi::Error Invalid(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "latent_tail: " + std::move(message));
}

std::string ToString(ffi::Span<const int64_t> values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

// Hands out buffers in the order of `spec.Operands`, then results; remembers the first fault.
class Checker {
 public:
  Checker(ffi::RemainingArgs arguments, ffi::RemainingRets results)
      : arguments_(arguments), results_(results) {}

  template <typename T>
  const T* Argument(const char* name, ffi::DataType dtype, std::initializer_list<int64_t> dims) {
    if (next_argument_ >= arguments_.size()) return Missing<T>(name, "operand");
    auto buffer = arguments_.get<ffi::AnyBuffer>(next_argument_++);
    return Check<T>(name, *buffer, dtype, dims);
  }

  // Rows of an operand that is still to come; -1 if there is none or it is not a matrix.
  int64_t RowsOfArgument(size_t offset) {
    if (next_argument_ + offset >= arguments_.size()) return -1;
    auto buffer = arguments_.get<ffi::AnyBuffer>(next_argument_ + offset);
    return buffer->dimensions().size() == 2 ? buffer->dimensions()[0] : -1;
  }

  template <typename T>
  T* Result(const char* name, ffi::DataType dtype, std::initializer_list<int64_t> dims) {
    if (next_result_ >= results_.size()) return Missing<T>(name, "result");
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    return Check<T>(name, **buffer, dtype, dims);
  }

  std::optional<std::string> Fault() {
    if (!fault_ && next_argument_ != arguments_.size()) {
      fault_ = std::to_string(arguments_.size()) + " operands instead of " +
               std::to_string(next_argument_);
    }
    if (!fault_ && next_result_ != results_.size()) {
      fault_ =
          std::to_string(results_.size()) + " results instead of " + std::to_string(next_result_);
    }
    return fault_;
  }

 private:
  template <typename T>
  T* Missing(const char* name, const char* what) {
    if (!fault_) fault_ = std::string("no ") + what + " '" + name + "'";
    return nullptr;
  }

  template <typename T>
  T* Check(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
           std::initializer_list<int64_t> dims) {
    ffi::Span<const int64_t> expected(dims.begin(), dims.size());
    bool equal = buffer.dimensions().size() == expected.size();
    for (size_t i = 0; equal && i < expected.size(); ++i) {
      equal = buffer.dimensions()[i] == expected[i];
    }
    if (!fault_ && buffer.element_type() != dtype) {
      fault_ = std::string(name) + " has dtype " +
               std::to_string(static_cast<int>(buffer.element_type())) + " instead of " +
               std::to_string(static_cast<int>(dtype)) + " (XLA's numbers)";
    }
    if (!fault_ && !equal) {
      fault_ = std::string(name) + " has shape " + ToString(buffer.dimensions()) + " instead of " +
               ToString(expected);
    }
    return static_cast<T*>(buffer.untyped_data());
  }

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t next_argument_ = 0;
  size_t next_result_ = 0;
  std::optional<std::string> fault_;
};

void DecodeTail(const Spec& spec, Checker& checker, Buffers& buffers) {
  if (spec.latent_dim > 0) {
    if (spec.top_k > 0) {
      buffers.permuted_rows = checker.RowsOfArgument(0);
      buffers.tokens = checker.RowsOfArgument(2);
      buffers.rows =
          checker.Argument<uint16_t>("rows", kBf16, {buffers.permuted_rows, spec.latent_dim});
      buffers.weights = checker.Argument<uint16_t>("weights", kBf16, {buffers.tokens, spec.top_k});
      buffers.indices =
          checker.Argument<int32_t>("indices", ffi::DataType::S32, {buffers.tokens, spec.top_k});
    } else {
      buffers.tokens = checker.RowsOfArgument(0);
      buffers.rows = checker.Argument<uint16_t>("rows", kBf16, {buffers.tokens, spec.latent_dim});
    }
    buffers.gamma = checker.Argument<uint16_t>("gamma", kBf16, {spec.latent_dim});
  } else {
    buffers.tokens = checker.RowsOfArgument(0);
  }
  if (spec.hidden_dim > 0) {
    buffers.shared = checker.Argument<uint16_t>("shared", kBf16, {buffers.tokens, spec.hidden_dim});
  }
  if (spec.latent_dim > 0) {
    buffers.latent = checker.Result<uint16_t>("latent", kBf16, {buffers.tokens, spec.latent_dim});
  }
  if (spec.hidden_dim > 0) {
    buffers.shard = checker.Result<uint16_t>("shard", kBf16, {buffers.tokens, spec.shard_dim()});
  }
}

}  // namespace

std::string Attributes::ToString() const {
  const char* op = spec.projects() ? "up_gather_add on " : spec.gathers ? "all_gather_add on " : "";
  return std::string(op) + "devices " + latent_tail::ToString(devices) + " (groups of " +
         std::to_string(spec.tp) + "), latent_dim " + std::to_string(spec.latent_dim) +
         ", hidden_dim " + std::to_string(spec.hidden_dim) + ", top_k " +
         std::to_string(spec.top_k) + ", max_tokens " + std::to_string(spec.max_tokens);
}

ffi::ErrorOr<Attributes> DecodeAttributes(ffi::Dictionary dictionary) {
  Attributes attributes;
  std::optional<ffi::Error> fault;
  auto get = [&](std::string_view name, auto& value) {
    auto found = dictionary.get<std::decay_t<decltype(value)>>(name);
    if (found.has_value()) {
      value = *found;
    } else if (!fault) {
      fault = Invalid("attribute '" + std::string(name) + "': " + found.error().message());
    }
  };
  Spec& spec = attributes.spec;
  get("tp", spec.tp);
  get("latent_dim", spec.latent_dim);
  get("hidden_dim", spec.hidden_dim);
  get("top_k", spec.top_k);
  get("max_tokens", spec.max_tokens);
  get("eps", spec.eps);
  get("fp32_internal", spec.fp32_internal);
  get("gathers", spec.gathers);
  get("has_residual", spec.has_residual);
  get("devices", attributes.devices);
  if (fault) return ffi::Unexpected(*fault);
  bool sound = spec.tp > 0 && spec.latent_dim >= 0 && spec.hidden_dim >= 0 && spec.top_k >= 0 &&
               spec.latent_dim + spec.hidden_dim > 0 && spec.hidden_dim % spec.tp == 0 &&
               (!spec.gathers || (spec.hidden_dim > 0 && spec.top_k == 0)) &&
               (spec.gathers || !spec.has_residual) && spec.max_tokens > 0 &&
               attributes.devices.size() > 0 && attributes.devices.size() % spec.tp == 0;
  if (!sound)
    return ffi::Unexpected(Invalid("attributes contradict each other: " + attributes.ToString()));
  return attributes;
}

ffi::ErrorOr<Buffers> DecodeBuffers(const Spec& spec, ffi::RemainingArgs arguments,
                                    ffi::RemainingRets results) {
  Checker checker(arguments, results);
  Buffers buffers;
  if (spec.gathers) {
    buffers.tokens = checker.RowsOfArgument(0);
    if (spec.projects()) {
      buffers.projected =
          checker.Argument<uint16_t>("latent", kBf16, {buffers.tokens, spec.latent_dim});
      buffers.w_up = checker.Argument<uint16_t>("w_up", kBf16, {spec.latent_dim, spec.shard_dim()});
    }
    buffers.x = checker.Argument<uint16_t>("x", kBf16, {buffers.tokens, spec.shard_dim()});
    if (spec.has_residual) {
      buffers.residual =
          checker.Argument<uint16_t>("residual", kBf16, {buffers.tokens, spec.hidden_dim});
    }
    buffers.gathered =
        checker.Result<uint16_t>("gathered", kBf16, {buffers.tokens, spec.hidden_dim});
  } else {
    DecodeTail(spec, checker, buffers);
  }
  auto fault = checker.Fault();
  if (!fault && (buffers.tokens < 1 || buffers.permuted_rows > INT32_MAX)) {
    fault = std::to_string(buffers.tokens) + " tokens, " + std::to_string(buffers.permuted_rows) +
            " expert rows";
  }
  if (fault) return ffi::Unexpected(Invalid(*fault));
  return buffers;
}

}  // namespace latent_tail
