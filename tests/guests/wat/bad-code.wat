;; Rejects with a code that is a sentence with a terminal escape.
(module
  ;;! include reward

  ;;! include reject
  (data (i32.const 1300) "\1b[2JNo")
  (func $odd (param $result i32)
    (call $reject (local.get $result) (i32.const 1300) (i32.const 0))
    (i32.store offset=12 (local.get $result) (i32.const 6)))
)
