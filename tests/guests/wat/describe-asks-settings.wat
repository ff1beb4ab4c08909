;; Reads a setting of the user in `describe`.
;;! contract 0.2.0
(module
  (import "querl:plugin/settings@0.1.0" "get" (func $get (param i32 i32 i32)))
  ;;! include reward
  (func $describe_odd
    (call $get (i32.const 1280) (i32.const 5) (i32.const 512))
    (if (i32.load8_u (i32.const 512)) (then (i32.store (i32.const 320) (i32.const 1)))))
  (func $odd (param i32))
)
