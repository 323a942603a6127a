// knapformer._core: the planners and the evaluator for Python. Arrays are copied in, columns move out, and the GIL is
// released in between.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>

#include "simple_planners.hpp"
#include "bounds.hpp"
#include "evaluation.hpp"
#include "lanes/lanes.hpp"
#include "moldable/moldable.hpp"
#include "problem.hpp"

namespace nb = nanobind;
using namespace knapformer;

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> copy_in(const Input<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <typename T>
nb::object move_out(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

nb::tuple columns_out(PlanColumns&& c) {
  return nb::make_tuple(move_out(std::move(c.lane)), move_out(std::move(c.segment_offsets)), move_out(std::move(c.segment_rank)),
                        move_out(std::move(c.segment_start)), move_out(std::move(c.segment_end)),
                        move_out(std::move(c.tile_offsets)), move_out(std::move(c.tile_rank)),
                        move_out(std::move(c.tile_head_start)), move_out(std::move(c.tile_head_end)),
                        move_out(std::move(c.tile_query_start)), move_out(std::move(c.tile_query_end)));
}

// Runs a planner without the GIL; gives its columns and its reason.
template <typename Planner>
nb::object solve(Planner planner) {
  std::optional<PlanColumns> columns;
  {
    nb::gil_scoped_release release;
    columns = planner();
  }
  if (!columns) return nb::none();
  const std::string reason = columns->reason;
  return nb::make_tuple(columns_out(std::move(*columns)), reason);
}

void init_problem(Problem* self, Input<int64_t> lengths, Input<int32_t> homes, Input<double> attention_s,
                  double linear_s_per_token, int32_t num_heads, Input<double> speeds, Input<int32_t> nodes,
                  double intra_bytes_per_s, double inter_bytes_per_s, double communication_scale,
                  double bytes_per_head_token, double latency_s, double interference, double link_margin,
                  const std::optional<Input<int64_t>>& max_tokens, int32_t effort) {
  new (self) Problem();
  self->lengths = copy_in(lengths);
  self->homes = copy_in(homes);
  self->attention_s = copy_in(attention_s);
  self->linear_s_per_token = linear_s_per_token;
  self->num_heads = num_heads;
  self->speeds = copy_in(speeds);
  self->nodes = copy_in(nodes);
  self->num_ranks = static_cast<int32_t>(self->speeds.size());
  self->intra_bytes_per_s = intra_bytes_per_s;
  self->inter_bytes_per_s = inter_bytes_per_s;
  self->communication_scale = communication_scale;
  self->bytes_per_head_token = bytes_per_head_token;
  self->latency_s = latency_s;
  self->interference = interference;
  self->link_margin = link_margin;
  self->max_tokens = max_tokens ? copy_in(*max_tokens) : std::vector<int64_t>(self->speeds.size(), kNoCap);
  self->effort = static_cast<Effort>(effort);
  self->prepare();
}

// The columns as columns_out gives them.
using ColumnArguments = std::tuple<Input<int8_t>, Input<int64_t>, Input<int32_t>, Input<int64_t>, Input<int64_t>, Input<int64_t>,
                                   Input<int32_t>, Input<int32_t>, Input<int32_t>, Input<int64_t>, Input<int64_t>>;

PlanView view_of(const Problem& problem, const ColumnArguments& columns) {
  return std::apply(
      [&](const auto& lane, const auto&... others) {
        const bool has_lanes = lane.shape(0) > 0;
        return PlanView{problem.num_sequences(), has_lanes ? 2 : 1, has_lanes ? lane.data() : nullptr, others.data()...};
      },
      columns);
}

nb::object deal_lanes(const Problem& problem, const ColumnArguments& columns) {
  std::vector<int8_t> lane;
  {
    const PlanView view = view_of(problem, columns);
    nb::gil_scoped_release release;
    lane = deal(problem, view);
  }
  return move_out(std::move(lane));
}

nb::dict evaluate_arrays(const Problem& problem, const ColumnArguments& columns) {
  const PlanView view = view_of(problem, columns);
  Evaluation e;
  double tight_s = 0.0;
  {
    nb::gil_scoped_release release;
    e = evaluate(problem, view);
    // The tight bound counts communication that nobody computes during; two lanes do.
    tight_s = view.num_lanes > 1 ? problem.lower_bound_s() : tight_bound_s(problem);
  }
  nb::dict out;
  out["makespan_s"] = e.makespan_s;
  out["lower_bound_s"] = problem.lower_bound_s();
  out["tight_bound_s"] = tight_s;
  out["bytes"] = e.bytes;
  out["num_split"] = e.num_split;
  out["num_meetings"] = e.num_meetings;
  out["moved_tokens"] = e.moved_tokens;
  out["linear_s"] = move_out(std::move(e.linear_s));
  out["attention_s"] = move_out(std::move(e.attention_s));
  out["communication_s"] = move_out(std::move(e.communication_s));
  out["tokens"] = move_out(std::move(e.tokens));
  return out;
}

}  // namespace

NB_MODULE(_core, m) {
  nb::class_<Problem>(m, "Problem")
      .def("__init__", &init_problem, nb::arg("lengths"), nb::arg("homes"), nb::arg("attention_s"),
           nb::arg("linear_s_per_token"), nb::arg("num_heads"), nb::arg("speeds"), nb::arg("nodes"),
           nb::arg("intra_bytes_per_s"), nb::arg("inter_bytes_per_s"), nb::arg("communication_scale"),
           nb::arg("bytes_per_head_token"), nb::arg("latency_s"), nb::arg("interference"), nb::arg("link_margin"),
           nb::arg("max_tokens").none(), nb::arg("effort"));
  m.def("evaluate", &evaluate_arrays);
  m.def("deal_lanes", &deal_lanes);
  m.def("home", [](const Problem& p) { return solve([&] { return std::optional(plan_home(p)); }); });
  m.def("whole", [](const Problem& p) { return solve([&] { return plan_whole(p); }); });
  m.def("ulysses", [](const Problem& p) { return solve([&] { return std::optional(plan_ulysses(p)); }); });
  m.def("moldable", [](const Problem& p) { return solve([&] { return std::optional(plan_moldable(p)); }); });
  m.def("two_lanes", [](const Problem& p) { return solve([&] { return std::optional(plan_two_lanes(p)); }); });
  m.def("bags", [](const Problem& p, const std::vector<int32_t>& sizes) {
    return solve([&] { return std::optional(plan_bags(p, sizes)); });
  });
}
