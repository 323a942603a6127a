#!/usr/bin/env bash
# A picture of a results page: scripts/screenshot.sh runs/demo.html docs/images/demo.png (needs Chromium).
set -euo pipefail
page=$(realpath "$1")
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1140,1190 \
  --virtual-time-budget=8000 --screenshot="$(realpath -m "$2")" "file://$page"
