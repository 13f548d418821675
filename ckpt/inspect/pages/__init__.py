"""Self-contained HTML pages of what the commands find: pictures as inline SVG, no script, nothing that is fetched.

May import what `ckpt.inspect` may. Start reading at `show` and `diff`, which make a page of the documents that `--json`
prints; `maps`, `treemap` and `heatmap` draw; `page` fills the templates and makes every name harmless.
"""
