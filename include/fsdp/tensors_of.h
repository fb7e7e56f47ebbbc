#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

/// Finds the tensors in what a model takes or returns: a tensor, and optionals,
/// pairs, tuples, arrays, vectors, maps and other ranges of what holds tensors,
/// nested at will. For a struct of its own a program writes, in the namespace
/// of the struct,
///
///   template <class F>
///   void for_each_tensor(Output& output, F&& visit) {
///     visit(output.logits);
///     visit(output.hidden);
///   }
///
/// What is none of these is taken to hold no tensors.
namespace fsdp::detail::tensors {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T, class F>
concept HasOwn = requires(T& value, F& visit) {
  for_each_tensor(value, visit);
};

template <class T, class F>
void visit_all(T& value, F& visit) {
  if constexpr (std::is_const_v<T>) {
    return; // the keys of a map
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (HasOwn<T, F>) {
    for_each_tensor(value, visit);
  } else if constexpr (IsOptional<T>::value) {
    if (value.has_value()) {
      visit_all(*value, visit);
    }
  } else if constexpr (TupleLike<T>) {
    std::apply(
        [&](auto&... elements) { (visit_all(elements, visit), ...); }, value);
  } else if constexpr (std::ranges::range<T>) {
    using Element = std::remove_reference_t<std::ranges::range_reference_t<T>>;
    if constexpr (
        std::is_lvalue_reference_v<std::ranges::range_reference_t<T>> &&
        std::is_class_v<Element>) {
      for (auto& element : value) {
        visit_all(element, visit);
      }
    }
  }
}

} // namespace fsdp::detail::tensors
