"""The report of one run: a self-contained page, its tables as Markdown, layer-wise curves as SVG."""
