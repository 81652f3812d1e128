"""Settings of Sphinx; `python -m docs.site` writes the pages and runs it."""

from flashinfer.version import __version__

project = "FlashInfer, rebuilt"
author = copyright = "The developers of FlashInfer, rebuilt"
release = version = __version__

extensions = ["myst_parser", "docs.site.extension"]
root_doc = "index"
templates_path: list[str] = []
default_role = "emphasis"  # a single backtick names a parameter in numpy's docstrings
highlight_language = "none"
smartquotes = False  # texts are shown as they are written
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!flashinfer).*")]

myst_heading_anchors = 4

add_module_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"FlashInfer, rebuilt {__version__}"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # written by the build; the browser needs nothing else
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_use_index = True
html_domain_indices = False
