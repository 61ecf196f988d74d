// The bytes of static shared memory that a kernel may have beside its dynamic shared memory.
#pragma once

namespace drot {

// Launcher::shared_memory() leaves so much of a block's shared memory free.
constexpr int kStaticShared = 1024;

}  // namespace drot
