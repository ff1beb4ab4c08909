;; Rejects with a detail of 200 MB.
(module
  ;;! include reward

  ;;! include reject
  (func $odd (param $result i32)
    (drop (memory.grow (i32.const 3060)))
    (memory.fill (i32.const 65536) (i32.const 120) (i32.const 200000000))
    (call $reject (local.get $result) (i32.const 65536) (i32.const 200000000)))
)
