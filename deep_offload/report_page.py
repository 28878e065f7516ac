"""The frame of a report: markup and style, light and dark. Braces of STYLE stand as they are."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{status}; started {started}</p></header>
<main>
{body}
</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f7f9; --ink: #1d232b; --quiet: #586273; --line: #d5dae1;
  --s0: #1763c6; --s1: #c2410c; --s2: #15803d; --s3: #7c3aed; --s4: #a16207; --s5: #0e7490;
  --s6: #8a94a6; --s7: #be185d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --card: #1e232b; --ink: #e7eaee; --quiet: #a3adbb;
  --line: #39414d; --s0: #6cb0ff; --s1: #ff9d6c; --s2: #5fd08a; --s3: #c3a6ff; --s4: #eac254; --s5: #5fd3e6;
  --s6: #8b95a5; --s7: #ff8cc0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 20px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; }
header p { margin: 4px 0 0; color: var(--quiet); }
h2 { font-size: 18px; margin: 32px 0 10px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
h3 { font-size: 15px; margin: 12px 0 4px; }
.quiet { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tiles dt { color: var(--quiet); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; }
.charts figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px;
  max-width: 560px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; }
.lanes figure { min-width: 720px; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 0 0 8px; padding: 0; }
.keys i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
table { border-collapse: collapse; margin-bottom: 10px; min-width: min(420px, 100%); }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 70px; }
td:first-child { min-width: 112px; }
th { color: var(--quiet); font-weight: 600; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; margin: 0; }
li { overflow-wrap: anywhere; }
details { border-bottom: 1px solid var(--line); padding: 4px 0; }
summary { cursor: pointer; font-weight: 600; }
main { padding-bottom: 48px; }
"""
