"""How the reports' pages look."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; } tr { border-bottom: 1px solid #ddd; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.extra { color: #666; } tr.sum { font-weight: bold; }
.figures td.number, td.unit { white-space: nowrap; } img { width: 100%; }
pre { background: #f5f5f2; padding: .75rem; white-space: pre-wrap; }
.yes { color: #2c6e2c; } .no { color: #b02a1a; font-weight: bold; }
"""
