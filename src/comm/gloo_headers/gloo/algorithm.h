#pragma once

// Nothing of it is needed; see gloo/context.h.
