// NoAutocast, for the kernels of ops that call products of ATen.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace drot {

// Switches autocast off in this thread while it exists. Under autocast a product of ATen would return its own
// dtype, also within an op, whose results and pointers are of the dtype of its arguments.
struct NoAutocast : c10::impl::ExcludeDispatchKeyGuard {
  NoAutocast() : ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset) {}
};

}  // namespace drot
