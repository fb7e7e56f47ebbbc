// Every view of a weight is taken while the weight is not there, knows its net,
// and shows the right elements when it is read.

#include "harness/chain.h"

#include "runtime/unit_storage.h"

namespace fsdp::testing {
namespace {

using at::Tensor;
using torch::indexing::Ellipsis;
using torch::indexing::None;
using torch::indexing::Slice;
using Views = std::vector<std::pair<std::string, Tensor>>;

void add_all(Views& views, const std::string& name, std::vector<Tensor> each) {
  for (auto& view : each) {
    views.emplace_back(name, std::move(view));
  }
}

Views shape_views(const Tensor& w) {
  return {
      {"alias", at::alias(w)},
      {"as_strided", w.as_strided({3, 2}, {2, 1}, 1)},
      {"detach", w.detach()},
      {"data", w.data()},
      {"variable_data", w.variable_data()},
      {"tensor_data", w.tensor_data()},
      {"expand", w.expand({2, 4, 6})},
      {"expand_as", w.expand_as(at::empty({2, 4, 6}))},
      {"squeeze", w.unsqueeze(0).squeeze()},
      {"squeeze dim", w.unsqueeze(0).squeeze(0)},
      {"unsqueeze", w.unsqueeze(1)},
      {"view", w.view({24})},
      {"view as int", w.view(at::kInt)},
      {"view as half", w.view(at::kHalf)},
      {"view_as", w.view_as(at::empty({24}))},
      {"reshape", w.reshape({2, 12})},
      {"reshape_as", w.reshape_as(at::empty({2, 12}))},
      {"_reshape_alias", at::_reshape_alias(w, {24}, {1})},
      {"flatten", w.flatten()},
      {"ravel", w.ravel()},
      {"unflatten", w.unflatten(1, {2, 3})},
      {"contiguous", w.contiguous()},
      {"to the same type", w.to(at::kFloat)},
      {"lift_fresh", at::lift_fresh(w)},
      {"real", at::real(w)},
      {"resolve_conj", w.resolve_conj()},
      {"resolve_neg", w.resolve_neg()},
      {"_neg_view", at::_neg_view(w)},
      {"unfold", w.unfold(1, 2, 2)},
      {"zero slice", w.slice(0, 2, 2)}};
}

Views axis_views(const Tensor& w) {
  return {
      {"permute", w.permute({1, 0})},
      {"t", w.t()},
      {"numpy_T", w.numpy_T()},
      {"mT", w.mT()},
      {"mH", w.mH()},
      {"adjoint", w.adjoint()},
      {"transpose", w.transpose(0, 1)},
      {"movedim", w.movedim(0, 1)},
      {"swapaxes", w.swapaxes(0, 1)},
      {"as_strided of t", w.t().as_strided({2, 2}, {1, 2})},
      {"chain", w.flatten().unflatten(0, {4, 6}).t()}};
}

Views part_views(const Tensor& w) {
  Views views = {
      {"diagonal", w.diagonal()},
      {"upper diagonal", w.diagonal(1)},
      {"narrow", w.narrow(0, 1, 2)},
      {"select", w.select(0, 1)},
      {"slice", w.slice(1, 1, 5, 2)},
      {"index with slices", w.index({Slice(1, 3), None, 2})},
      {"index with dots", w.index({Ellipsis, 0})},
      {"brackets", w[1][2]}};
  add_all(views, "split", w.split(2));
  add_all(views, "split_with_sizes", w.split_with_sizes({1, 3}));
  add_all(views, "chunk", w.chunk(2, 1));
  add_all(views, "unbind", w.unbind());
  add_all(views, "tensor_split", w.tensor_split(3, 1));
  add_all(views, "hsplit", w.hsplit(2));
  add_all(views, "vsplit", w.vsplit(2));
  return views;
}

/// Operators whose schema does not say that they return views.
Views undeclared_views(const Tensor& w) {
  Views views = {
      {"_unsafe_view", at::_unsafe_view(w, {24})},
      {"atleast_3d", at::atleast_3d(w)}};
  add_all(views, "unsafe_split", at::unsafe_split(w, 2));
  add_all(views, "unsafe_chunk", at::unsafe_chunk(w, 2, 1));
  return views;
}

Views complex_views(const Tensor& z) {
  return {
      {"real part", at::real(z)},
      {"imaginary part", at::imag(z)},
      {"conj", z.conj()},
      {"view_as_real", at::view_as_real(z)},
      {"mH of complex", z.mH()},
      {"view_as_complex", at::view_as_complex(at::view_as_real(z))}};
}

/// Elements of a view, through operators.
Tensor read(const Tensor& view) {
  auto values = view;
  if (values.scalar_type() == at::kHalf) { // its bits, which may be NaN
    values = values.contiguous().view(at::kShort);
  }
  return values.resolve_conj().resolve_neg().clone(
      at::MemoryFormat::Contiguous);
}

struct Tensors {
  Tensor w = torch::randn({4, 6}).requires_grad_();
  Tensor z = torch::randn({4, 6}, at::kComplexFloat).requires_grad_();
  Tensor other = torch::randn({4, 6}).requires_grad_();

  NamedUnits units() const {
    return {
        {"w", {{"w", w}}}, {"z", {{"z", z}}}, {"other", {{"other", other}}}};
  }
};

std::shared_ptr<Tensors> build_tensors() {
  const auto model = build([] {
    TestModel result;
    result.owner = std::make_shared<Tensors>();
    return result;
  });
  return std::static_pointer_cast<Tensors>(model.owner);
}

using TakeViews = std::function<Views(const Tensors&)>;
enum class Reads : uint8_t { kNothing, kMay };

void expect_views(const TakeViews& take, Reads reads, const World& world) {
  const torch::NoGradGuard no_grad;
  const auto plain = build_tensors();
  const auto expected = take(*plain);
  const auto tensors = build_tensors();
  ShardedTensors net(tensors->units(), world, Options().slots(1));
  net.call([&] {
    const auto gathers = net.gathers();
    const auto views = take(*tensors);
    if (reads == Reads::kNothing) {
      EXPECT_EQ(net.gathers(), gathers) << "a view read its weight";
    }
    ASSERT_EQ(views.size(), expected.size());
    for (size_t i = 0; i < views.size(); ++i) {
      const auto& [name, view] = views[i];
      EXPECT_TRUE(view.key_set().has(detail::kTouchKey)) << name;
      EXPECT_NE(detail::unit_storage(view), nullptr) << name;
      EXPECT_EQ(view.strides(), expected[i].second.strides()) << name;
      EXPECT_EQ(view.storage_offset(), expected[i].second.storage_offset());
      tensors->other.sum(); // lets the others go
      EXPECT_TRUE(at::equal(read(view), read(expected[i].second))) << name;
    }
  });
}

void expect_views_in_all_worlds(
    const TakeViews& take,
    Reads reads = Reads::kNothing) {
  for (const int world_size : {1, 2, 3, 4}) {
    SCOPED_TRACE("world size " + std::to_string(world_size));
    ASSERT_NO_THROW(run_ranks(
        world_size,
        [&](const World& world) { expect_views(take, reads, world); },
        kWaitLimit));
  }
}

TEST(ViewOperators, OfShapes) {
  expect_views_in_all_worlds(
      [](const auto& each) { return shape_views(each.w); });
}

TEST(ViewOperators, OfAxes) {
  expect_views_in_all_worlds(
      [](const auto& each) { return axis_views(each.w); });
}

TEST(ViewOperators, OfParts) {
  expect_views_in_all_worlds(
      [](const auto& each) { return part_views(each.w); });
}

TEST(ViewOperators, ThatDoNotDeclareIt) {
  expect_views_in_all_worlds(
      [](const auto& each) { return undeclared_views(each.w); }, Reads::kMay);
}

TEST(ViewOperators, OfComplexWeights) {
  expect_views_in_all_worlds(
      [](const auto& each) { return complex_views(each.z); });
}

TEST(ViewOperators, ThatAutogradRecordedTrain) {
  ParitySettings settings;
  settings.optimizer = Optimizer::kSgd; // libtorch's AdamW is for real numbers
  settings.learning_rate = 1e-3;
  const auto make = [] {
    const auto tensors = std::make_shared<Tensors>();
    const auto x = torch::randn({kRows, 4});
    return TestModel{
        tensors->units(),
        [tensors, x](const Tensor& rows) {
          const auto& w = tensors->w;
          const auto y = x.index_select(0, rows);
          const auto z = at::view_as_real(tensors->z);
          const auto parts = y.mm(w.view({2, 12}).reshape({4, 6})) +
              y.mm(w.t().contiguous().t().narrow(1, 0, 6)) +
              w.unbind()[2] * w.chunk(2, 0)[1][1] + y.mm(z.select(2, 1)) +
              at::real(tensors->z.conj()).select(0, 3);
          return (parts * tensors->other.diagonal().sum()).pow(2).mean();
        },
        tensors};
  };
  expect_same_training(make, settings);
}

} // namespace
} // namespace fsdp::testing
