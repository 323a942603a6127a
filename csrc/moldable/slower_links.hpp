// The phase "slower links" (docs/planning.md): what a plan may cost if links are slower than the cost model has them.
#pragma once

#include "moldable/contest.hpp"

namespace knapformer {

// Links may be `link_margin` times slower than stated: those between nodes alone, or all with their latency. A winner that would
// then take 1 % longer than another planner's plan gives way. Plans are made for links ever slower, up to the margin, until one
// would not. Of those plans the lowest makespan over stated links wins. None is taken that is worse there than another planner's.
void enter_for_slower_links(const Problem& problem, Contest& contest);

}  // namespace knapformer
