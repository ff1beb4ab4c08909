;; Returns a text that lies beyond its memory.
(module
  ;;! include reward

  ;;! include reject
  (func $odd (param $result i32)
    (call $reject (local.get $result) (i32.const 0x7ffffff0) (i32.const 1000)))
)
