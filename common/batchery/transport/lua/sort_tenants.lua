-- Sorts some of what waits in a list by tenant.
-- include tenants.lua
--
-- KEYS[1]  HASH  tenants, see tenants.lua; it names the list
-- KEYS[2]  LIST  a queue, or one of its priority steps
-- Returns  how many messages are not sorted, or a little more.
return sort(KEYS[1], KEYS[2])
