;; Returns two components with the same name.
(module
  ;;! include reward

  (data (i32.const 1300) "part")
  (func $odd (param $result i32)
    (i32.store offset=16 (local.get $result) (i32.const 512))
    (i32.store offset=20 (local.get $result) (i32.const 2))
    (i32.store (i32.const 512) (i32.const 1300))
    (i32.store (i32.const 516) (i32.const 4))
    (i32.store (i32.const 528) (i32.const 1300))
    (i32.store (i32.const 532) (i32.const 4)))
)
