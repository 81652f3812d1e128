"""Prints the modules with their architectures and sizes."""

from . import __version__, modules

for name, module in sorted(modules.items(), key=lambda item: -item[1]["bytes"]):
    archs = " ".join(f"sm_{arch}" for arch in module["archs"]) or "host"
    print(f"{module['bytes'] >> 10:6d} KiB  {archs:16s} {name}")
total = sum(module["bytes"] for module in modules.values())
print(f"{len(modules)} modules of flashinfer-python {__version__}, {total >> 10} KiB")
