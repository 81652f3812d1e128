// NVRTC declares the vector types itself.
#pragma once
