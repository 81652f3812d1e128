// NVRTC declares the types of the CUDA runtime itself; its functions are host code.
#pragma once
