#include "lanes/lanes.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "evaluation.hpp"
#include "moldable/moldable.hpp"
#include "moldable/relabel.hpp"
#include "simple_planners.hpp"

namespace knapformer {
namespace {

// Over the lower bound: how full ranks are made, and at which makespan no other target is tried.
constexpr std::array kFull{1.0005, 1.002, 1.005, 1.01, 1.02, 1.04};
constexpr std::array kLargestShares{0.9, 0.7, 0.5};
constexpr double kGoodEnough = 1.002, kWorthMoldable = 1.02;

class Best {
 public:
  explicit Best(const Problem& problem) : p_(problem) {}

  void enter(PlanColumns plan, const std::string& reason) {
    const Evaluation score = evaluate(p_, plan.view());
    for (int32_t r = 0; r < p_.num_ranks; ++r) {
      if (score.tokens[r] > p_.max_tokens[r]) return;
    }
    if (plan_ && score.makespan_s >= makespan_s_) return;
    makespan_s_ = score.makespan_s;
    plan_ = std::move(plan);
    plan_->reason = reason;
  }

  bool within(double factor) const { return plan_ && makespan_s_ <= factor * p_.lower_bound_s(); }
  PlanColumns winner() { return std::move(*plan_); }

 private:
  const Problem& p_;
  std::optional<PlanColumns> plan_;
  double makespan_s_ = 0.0;
};

PlanColumns with_lanes(const Problem& problem, PlanColumns plan) {
  plan.lane = deal(problem, plan.view());
  return plan;
}

PlanColumns plan_for(const Problem& problem, const Target& target) {
  const auto shares = spread(problem, target);
  std::vector<int64_t> room = problem.max_tokens;
  std::vector<Placement> placements(shares.size());
  for (bool is_split : {false, true}) {  // whole sequences cannot give way
    for (int32_t s : problem.heaviest_first) {
      if ((shares[s].size() > 1) == is_split) placements[s] = cut(problem, s, shares[s], room);
    }
  }
  keep_home(problem, placements);
  PlanColumns plan;
  for (auto& placement : placements) plan.add_placement(std::move(placement));
  return with_lanes(problem, std::move(plan));
}

}  // namespace

PlanColumns plan_two_lanes(const Problem& problem) {
  Best best(problem);
  for (double full : kFull) {
    for (double largest : kLargestShares) {
      if (best.within(kGoodEnough)) break;
      best.enter(plan_for(problem, {full * problem.lower_bound_s(), largest}), "own layout");
    }
    if (best.within(full)) break;
  }
  best.enter(plan_home(problem), "home");
  if (!best.within(kWorthMoldable)) {
    best.enter(with_lanes(problem, plan_ulysses(problem)), "ulysses");
    PlanColumns one_lane = plan_moldable(problem);
    best.enter(with_lanes(problem, one_lane), "one lane's " + one_lane.reason + " in two lanes");
    best.enter(one_lane, "one lane's " + one_lane.reason);
  }
  return best.winner();
}

}  // namespace knapformer
