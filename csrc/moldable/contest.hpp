// The phase "contest" (docs/planning.md): which of several plans wins.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "evaluation.hpp"
#include "problem.hpp"

namespace knapformer {

// The lowest makespan wins, then the fewest bytes, then the fewest split sequences. Plans that break a cap do not take part.
class Contest {
 public:
  // Plans that are not below `below_s` do not take part either.
  explicit Contest(const Problem& problem, double below_s = std::numeric_limits<double>::infinity())
      : p_(problem), below_s_(below_s) {}

  double makespan_s() const { return plan_ ? score_.makespan_s : below_s_; }
  const PlanColumns& leader() const { return *plan_; }
  PlanColumns winner() { return std::move(*plan_); }

  // Whether the plan keeps the caps. It says `reason` where it wins.
  bool enter(PlanColumns plan, const std::string& reason);
  // The same for placements, which first get the phase "home".
  bool enter_placements(std::vector<Placement> placements, const std::string& reason);
  // What the reasons of plans that enter from now on end with.
  void say(std::string where) { where_ = std::move(where); }
  // It wins, whatever its makespan.
  void replace(PlanColumns plan);

 private:
  bool better(const Evaluation& other) const;

  const Problem& p_;
  double below_s_;
  std::string where_;
  std::optional<PlanColumns> plan_;
  Evaluation score_;
};

double heaviest_alone_s(const Problem& problem);

// The phase "whole": first without the caps, then under them if the first plan breaks one.
void enter_whole(const Problem& problem, Contest& contest);

// The plans of `home`, `ulysses` and bags, but for those that a bound leaves no chance.
void enter_others(const Problem& problem, Contest& contest);

}  // namespace knapformer
