// Products of warpgroups are not emulated; what is of the kernel for Hopper does without.
#pragma once
