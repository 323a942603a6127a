// The phases of moldable (docs/planning.md and csrc/README.md name them too):
//   Whole. Whole sequences are packed, unless one of them alone exceeds the lower bound. If the result is as good as the bound,
//      nothing is split.
//   Layouts (layout.hpp), estimates (candidates.hpp), packing and improving (search.hpp), sharing inside a group
//      (group_solver.hpp). They find the groups and what goes into them.
//   Home (relabel.hpp). Equal ranks and equal sequences are exchanged so that more tokens stay home.
//   Contest. The other planners' plans are compared too, where a quick bound leaves them a chance and they keep the caps. The
//      lowest makespan wins, then the fewest bytes, then the fewest splits.
//   Fewer ranks. Where the winner is far from the tight bound, all phases are run for fewer ranks too, as long as their bound is lower.
//   Slower links (slower_links.hpp). A winner that would lose to another planner's plan if links were slower than stated gives way
//      to a plan that would not.
#include "moldable/moldable.hpp"

#include <algorithm>
#include <numeric>

#include "bounds.hpp"
#include "moldable/contest.hpp"
#include "moldable/search.hpp"
#include "moldable/slower_links.hpp"

namespace knapformer {
namespace {

constexpr double kFarOff = 1.04;      // over the tight bound: then fewer ranks are tried
constexpr int32_t kManyRanks = 1024;  // above, few counts of ranks are tried: they gain less and cost more
constexpr int32_t kTriedRanks = 4096;  // ranks of those tries together, but one try at least
constexpr double kGoodEnough = 1e-4;  // relative distance from the lower bound at which whole sequences are left alone

// The first `count` ranks alone. Sequences of the others have their home on the last of these.
Problem first_ranks(const Problem& problem, int32_t count) {
  Problem first = problem;
  first.num_ranks = count;
  first.speeds.resize(count);
  first.nodes.resize(count);
  first.max_tokens.resize(count);
  for (auto& home : first.homes) home = std::min(home, count - 1);
  first.prepare();
  return first;
}

bool caps_hold(const Problem& problem) {
  int64_t room = 0, tokens = 0;
  for (int64_t cap : problem.max_tokens) room += cap;
  for (int64_t length : problem.lengths) tokens += length;
  return tokens <= room;
}

}  // namespace

void compete(const Problem& problem, Contest& contest) {
  const double bound = problem.lower_bound_s();
  const double alone = heaviest_alone_s(problem);
  const bool whole_first = alone <= bound * (1.0 + kGoodEnough);
  if (whole_first) enter_whole(problem, contest);
  if (contest.makespan_s() > bound * (1.0 + kGoodEnough)) {
    Search search(problem);
    contest.enter_placements(search.place(search.run()), "own layout");
  }
  if (!whole_first && alone < contest.makespan_s()) enter_whole(problem, contest);
  enter_others(problem, contest);
}

namespace {

// N less 1, 2, 4, ... ranks, down to N / 2, then N / 4, N / 8, ...; the first of these only where N is large.
std::vector<int32_t> fewer_counts(int32_t num_ranks) {
  std::vector<int32_t> counts;
  for (int32_t less = 1; 2 * less < num_ranks; less *= 2) counts.push_back(num_ranks - less);
  for (int32_t count = num_ranks / 2; count > 0; count /= 2) counts.push_back(count);
  if (num_ranks > kManyRanks) counts.resize(std::min<size_t>(counts.size(), std::max(1, kTriedRanks / num_ranks)));
  return counts;
}

// The phase "fewer ranks".
void enter_fewer(const Problem& problem, Contest& contest) {
  if (problem.effort == Effort::kFast) return;
  if (problem.total_work_s <= 0.0 || contest.makespan_s() <= kFarOff * tight_bound_s(problem)) return;
  for (int32_t count : fewer_counts(problem.num_ranks)) {
    const Problem fewer = first_ranks(problem, count);
    if (fewer.lower_bound_s() >= contest.makespan_s()) break;
    if (!caps_hold(fewer) || tight_bound_s(fewer) >= contest.makespan_s()) continue;
    contest.say(" on " + std::to_string(count) + " of " + std::to_string(problem.num_ranks) + " ranks");
    compete(fewer, contest);
  }
}

}  // namespace

PlanColumns plan_moldable(const Problem& problem) {
  Contest contest(problem);
  compete(problem, contest);
  enter_fewer(problem, contest);
  enter_for_slower_links(problem, contest);
  return contest.winner();
}

}  // namespace knapformer
