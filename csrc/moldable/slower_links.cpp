#include "moldable/slower_links.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "moldable/moldable.hpp"

namespace knapformer {
namespace {

constexpr double kAllowed = 1.01;  // over another planner's plan
constexpr double kPrice = 1.03;    // over the stated winner, over stated links; more only where slower links would cost more still
constexpr std::array kSteps{0.5, 0.75, 1.0};  // of the margin's logarithm

enum class Slower { kBetweenNodes, kAll };

Problem with_slower_links(const Problem& problem, Slower which, double times) {
  Problem slower = problem;
  slower.effort = Effort::kFast;
  slower.inter_bytes_per_s /= times;
  if (which == Slower::kAll) {
    slower.intra_bytes_per_s /= times;
    slower.latency_s *= times;
  }
  return slower;
}

double makespan_s(const Problem& problem, const PlanColumns& plan) { return evaluate(problem, plan.view()).makespan_s; }

// The lowest makespan of another planner's plan, or `below_s` if all take longer.
double best_other_s(const Problem& problem, double below_s) {
  Contest others(problem, below_s);
  if (heaviest_alone_s(problem) < below_s) enter_whole(problem, others);
  enter_others(problem, others);
  return others.makespan_s();
}

// A world in which links are as slow as the margin says, and the lowest makespan of another planner's plan in it; or the stated
// winner's makespan less what is allowed, where that is lower.
struct World {
  Slower which;
  Problem problem;
  double best_other_s;
  double regret(const PlanColumns& plan) const { return makespan_s(problem, plan) / best_other_s; }
};

std::vector<World> worlds_of(const Problem& problem, const PlanColumns& plan) {
  std::vector<World> worlds;
  for (Slower which : {Slower::kBetweenNodes, Slower::kAll}) {
    if (which == Slower::kBetweenNodes && problem.num_nodes < 2) continue;
    Problem slower = with_slower_links(problem, which, problem.link_margin);
    const double best_s = best_other_s(slower, makespan_s(slower, plan) / kAllowed);
    worlds.push_back({which, std::move(slower), best_s});
  }
  return worlds;
}

struct Choice {
  PlanColumns plan;
  double makespan_s;  // over stated links
  double regret;      // the largest over worlds: makespan over the best other's, but at least what is allowed
};

Choice judged(const Problem& problem, const std::vector<World>& worlds, PlanColumns plan) {
  double regret = kAllowed;
  for (const auto& world : worlds) regret = std::max(regret, world.regret(plan));
  const double stated_s = makespan_s(problem, plan);
  return {std::move(plan), stated_s, regret};
}

bool better(const Choice& a, const Choice& b) { return a.regret != b.regret ? a.regret < b.regret : a.makespan_s < b.makespan_s; }

}  // namespace

void enter_for_slower_links(const Problem& problem, Contest& contest) {
  if (problem.link_margin <= 1.0 || problem.effort == Effort::kFast || problem.total_work_s <= 0.0) return;
  const std::vector<World> worlds = worlds_of(problem, contest.leader());
  const Choice stated = judged(problem, worlds, contest.leader());
  std::optional<Choice> best;
  for (double step : kSteps) {
    if ((best ? *best : stated).regret <= kAllowed) break;
    for (const auto& world : worlds) {
      const Problem slower = with_slower_links(problem, world.which, std::pow(problem.link_margin, step));
      Contest own(slower);
      compete(slower, own);
      Choice choice = judged(problem, worlds, own.winner());
      if (choice.makespan_s > stated.makespan_s * std::max(kPrice, stated.regret / choice.regret)) continue;
      if (!better(choice, best ? *best : stated) || best_other_s(problem, choice.makespan_s) < choice.makespan_s) continue;
      best = std::move(choice);
    }
  }
  if (!best) return;
  best->plan.reason += ", safer where links are slower than stated";
  contest.replace(std::move(best->plan));
}

}  // namespace knapformer
