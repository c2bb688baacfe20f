"""Define the report's style sheet for light and dark mode, and the arrowhead of its charts."""

TIP = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0l8 4l-8 4z"/></marker></defs></svg>'
)

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6675;--rule:#e3e7ec;--curve:#2563c9;
--void:#aeb9c7;--eval:#c26a00;--ckpt:#2e8b57;--fire:#c8283c;--back:#8b2fb0;--act:#7b4fa3;--resume:#7c8796;
--new:#2e8b57;--rep:#d9822b;--move:#4c83d4;--idle:#b4bdc9;--still:#c8283c}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--ink:#e6eaf0;--soft:#9aa7b6;--rule:#2d3541;
--curve:#6ea8fe;--void:#55616f;--eval:#f0a848;--ckpt:#5fc48d;--fire:#ff6b7a;--back:#d28bf0;--act:#b79be0;
--resume:#8f9bab;--new:#4caf7d;--rep:#e0994f;--move:#6ea8fe;--idle:#566170;--still:#ff6b7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1060px;margin:0 auto;padding:28px 20px 40px}
header{display:flex;align-items:baseline;gap:14px;flex-wrap:wrap}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 10px}
small{color:var(--soft);font-weight:400;font-size:.85em}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:16px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:14px 2px}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
p.state,span.state{margin:0;font-weight:600;color:var(--soft)}
.state.complete{color:var(--ckpt)}
.state.failed{color:var(--fire)}
.state.running{color:var(--curve)}
.state.interrupted,.state.paused{color:var(--eval)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:14px 20px}
figure{margin:0}
figcaption{font-weight:600;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.bar{display:inline-block;width:120px;height:10px;vertical-align:middle;margin-right:6px}
text{font-size:12px;fill:var(--ink)}
text.axis{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
text.none,p.none{fill:var(--soft);color:var(--soft)}
.grid{stroke:var(--rule)}
.base{stroke:var(--soft)}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
polyline.curve{stroke:var(--curve)}
polyline.void{stroke:var(--void);stroke-width:1.3}
polyline.eval{stroke:var(--eval)}
polyline.dim{opacity:.28;stroke-width:1}
polyline.mean{stroke-width:2.2}
text.word{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
circle.curve{fill:var(--curve)}
circle.void{fill:var(--void)}
circle.eval{fill:var(--eval)}
path.ckpt{fill:var(--ckpt)}
path.odd{stroke:var(--fire);stroke-width:2;fill:none}
.stem{stroke-width:1;stroke-dasharray:3 3}
.stem.fire{stroke:var(--fire)}
.stem.back{stroke:var(--back)}
.stem.act{stroke:var(--act)}
.stem.resume{stroke:var(--resume);stroke-dasharray:none;opacity:.7}
.spot{stroke:var(--card);stroke-width:1.5}
.spot.fire{fill:var(--fire)}
.spot.back{fill:var(--back)}
.spot.act{fill:var(--act)}
.arc{fill:none;stroke:var(--back);stroke-width:1.8}
path.tip{fill:var(--back)}
text.fire{fill:var(--fire)}
text.back{fill:var(--back)}
text.act{fill:var(--act)}
text.resume{fill:var(--soft)}
span.word{font-weight:600;white-space:nowrap}
span.fire{color:var(--fire)}
span.back{color:var(--back)}
span.act{color:var(--act)}
.legend{margin:10px 0 0;display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:13px}
.legend .key{color:var(--soft)}
.key::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;
background:var(--resume)}
.key.curve::before{background:var(--curve)}
.key.void::before{background:var(--void)}
.key.eval::before{background:var(--eval)}
.key.fire::before,.key.act::before,.key.back::before,.key.ckpt::before{width:9px;height:9px;border-radius:50%;background:var(--fire)}
.key.act::before{background:var(--act)}
.key.back::before{background:var(--back)}
.key.ckpt::before{border-radius:0;clip-path:polygon(50% 0,100% 100%,0 100%);background:var(--ckpt)}
.key.odd::before{content:"×";background:none;color:var(--fire);font-weight:700;height:auto;width:auto}
.key.resume::before{width:2px;height:11px}
.productive_s{fill:var(--new)}
.repeated_s{fill:var(--rep)}
.transferring_s{fill:var(--move)}
.idle_s{fill:var(--idle)}
.stalled_s{fill:var(--still)}
.key.productive_s::before,.key.repeated_s::before,.key.transferring_s::before,.key.idle_s::before,
.key.stalled_s::before{width:10px;height:10px}
.key.productive_s::before{background:var(--new)}
.key.repeated_s::before{background:var(--rep)}
.key.transferring_s::before{background:var(--move)}
.key.idle_s::before{background:var(--idle)}
.key.stalled_s::before{background:var(--still)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:600;border-bottom:1px solid var(--rule);padding:4px 14px 4px 0;
white-space:nowrap}
td{border-bottom:1px solid var(--rule);padding:5px 14px 5px 0;vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace}
footer{color:var(--soft);font-size:13px;margin:18px 2px}
@media print{section{break-inside:avoid}}
"""
