-- A function for the other scripts here, which include it. No script itself.

-- When a message was sent, in Unix seconds, as text; nil if it does not say so, as those of plain
-- clients do not.
local function sent_at_of(message)
  -- A body is base64 or has its quotes escaped, so only a header can look like this.
  local text = string.match(message, '"batchery_sent_at": ([%d.]+)')
  -- Anybody may push anything, such as 1.2.3.
  return tonumber(text or '') and text
end
