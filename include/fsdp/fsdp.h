#pragma once

#include <fsdp/communicator.h>
#include <fsdp/description.h>
#include <fsdp/fully_shard.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/init.h>
#include <fsdp/memory.h>
#include <fsdp/optim.h>
#include <fsdp/options.h>
#include <fsdp/sharded_module.h>
#include <fsdp/touch.h>
#include <fsdp/unit_options.h>
#include <fsdp/units.h>
#include <fsdp/version.h>
#include <fsdp/world.h>
